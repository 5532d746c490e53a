"""`demopt plan`: bytes, seconds and memory per step, and which method pays on a link, before anything runs.

costs    bytes and memory, from the optimizers themselves     network    seconds on a link, and the verdict
command  flags and output
"""
