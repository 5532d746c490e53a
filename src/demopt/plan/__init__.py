"""`demopt plan`: bytes, seconds and memory of a step, by route and number of workers, before anything runs.

    model    the shapes of a model, from a preset, a count or a file      costs    bytes and memory, of the routes' own
    network  what bytes and rounds take on a link                         table    how it is shown
    command  the flags

Importing this package imports none of the libraries that show tables.
"""
