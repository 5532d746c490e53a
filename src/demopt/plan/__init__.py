"""`demopt plan`: bytes, network seconds and memory of a step, by route and number of workers, before anything runs.

    model    the shapes of a model, from a preset, a count or a file      costs    bytes and memory, by the routes' code
    network  time of bytes and rounds on a link                           table    output as tables or data
    verdict  what to take on a link               command  the flags

Importing this package does not import the libraries that print tables.
"""
