"""Replays: the samples of any step of a recorded run, their matches and losses, and the steps that show a file.

    run folder --ReplayRun--> plan, source, settings --replay_step--> Replayed: images, targets, samples
                                                     \\-> appearances: where a file was shown, from draws alone

Files:

    appearances  In which steps and roles a file of the data set was shown, from draws alone
    losses       Matches and losses of a replayed step, for weights that were saved nearest to it
    run          A recorded run: its options, data and record, opened without training
    sheet        Picture sheets of a replayed step, or of one of its samples with its source images
    step         A replayed step: the images and targets that the network saw, compared with the record
"""
