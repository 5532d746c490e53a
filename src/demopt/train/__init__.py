"""`demopt train`: from text to a trained model, with the workers of one machine or under torchrun.

    config    all settings                        options   CLI flags generated from config
    sources   files, folders, JSONL, hub          tokens    text to tokens          data    split, batches
    model     presets and the decoder             method    DeMo, or AdamW-DDP      loop    training steps
    team      ranks and their collectives         worker    one rank, start to end  launch  starts all ranks
    published the paper's training settings       processes worker processes and their failures
    folder    file layout of --out                checkpoint, evaluate, report, summary, sample: as named

Importing this package does not import the libraries that training needs.
"""
