"""Observing a training while it runs: recorders, probes and samplers turn steps and workers into plain numbers.

Files:

    any_loop        Watch a training that nobody edited: its loop is found by what torch sees of it
    device_times    GPU times of training steps: from events on its streams, and from a trace of a few steps
    engine_steps    Observing a training that flatout's own engine runs: the engine's marks tell where steps begin
    hooks           Stage marks for a training loop that has none: hooks around model, loss, backward
    limits          Limits of a training, from three short runs that each leave something out
    line_counts     How often each line of the user's code runs per step
    loader_probe    Timing inside the workers of a torch DataLoader: samples, collation, CPU time and running lines
    network_runs    The network of an observed loop by itself: other batch sizes, threads, no slow settings
    observation     Observing some steps of a training loop, one phase after the other (see `Phases`)
    recorder        Stage times per training step, and a sampler of the running code line
    speed_of_light  Hardware limits ("speed of light") of this machine: copies, launches and decoding
    summary         Lanes and hot lines of a measurement, from what recorders, samplers and workers collected
    waits           Host-device waits, counted per code line over a few steps that are not timed
    watch           Watch any PyTorch training loop: where its time goes, why, and how fast each remedy would make it
"""
