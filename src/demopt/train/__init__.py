"""`demopt train`: from text to a trained model, with the workers of one machine or under torchrun.

    launch      starts the workers of this machine, and reports how they ended
    worker      one worker, from joining the others to the last file       loop     its training steps
    checkpoint  saves and finds checkpoints       report   metrics, progress, tracker, table, picture
    method      optimizers, and their costs       data     text to tokens to batches
    model       decoder, losses                   team     ranks, devices, addresses, small collectives
    out         the files in --out                config   all settings

Each module imports only ones below it. runs/ is for `--run`: workers that come and go, through a folder. Importing
this package does not import the libraries that training needs.
"""
