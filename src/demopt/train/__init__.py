"""`demopt train`: from text to a trained model, with the workers of one machine or under torchrun.

    config    all settings                        options   CLI flags generated from config
    sources   files, folders, JSONL, hub          tokens    text to tokens          data    split, batches
    model     presets and the decoder             method    LocalDeMo, DeMo, or DDP loop    training steps
    team      ranks and their collectives         worker    one rank, start to end  launch  starts all ranks
    published the paper's training settings       processes worker processes and their failures
    folder    file layout of --out                records   which checkpoints there are, and whose
    assemble  settings from flags, files, records integrity checksums of checkpoints
    preflight networks, before the first step     key       the secret of a run
    checkpoint, evaluate, sample, versions: as named

    report    what is written and shown during a run:      progress, dashboard, trackers
    finish    what is left at its end:                     summary (tables), curve, plot, card, hub

    elastic   starts replicas, workers that come and go   replica  one of them   lighthouse  and the board beside it
    elastic_checkpoint, elastic_command, writer: as named

Importing this package does not import the libraries that training needs.
"""
