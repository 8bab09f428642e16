"""Looking at a training while it runs: recorders, probes and samplers, from steps and workers to plain numbers.

Files:

    device_times    What the GPU did and how long it took: events on its stream, and a trace of a few steps
    engine_steps    Observe a training by flatout's own engine
    hooks           Stages for a training loop that has no marks
    limits          Which part sets the speed? Three short runs, each of which leaves something out
    loader_probe    What happens inside the workers of a torch DataLoader
    observation     Look at a training loop for some steps
    recorder        What each training step spent where: a clock recorder that tells steps apart and keeps a timeline
    speed_of_light  How fast can this machine go at all? Copies, launches and decoding, measured in a second or two
    summary         From what recorders, samplers and probes hold to the lanes and lines of a measurement
    waits           Where does the host wait for the device? Count per code line, over a few steps that are not timed
    watch           Watch any PyTorch training loop
"""
