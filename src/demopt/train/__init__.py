"""`demopt train`: from text to a trained model, on the workers of one machine or under torchrun.

    config    every setting, once                 options   flags made from it
    sources   files, folders, JSONL, hub          tokens    text to tokens          data    split, batches
    model     presets and the decoder             method    DeMo, or AdamW-DDP      loop    the steps
    team      ranks and what they agree on        worker    one rank, start to end  launch  starting all of them
    published the paper's training                processes worker processes and how they failed
    folder    what lies where in --out            checkpoint, evaluate, report, summary, sample: as they are called

Importing this package imports none of the libraries that training needs.
"""
