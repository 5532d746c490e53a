"""`demopt bench`: measures time, memory and bytes of an optimizer step, beside other optimizers in the same run.

    command   the flags                         config     the settings of a run
    launch    one team of workers after another worker     one worker
    step      the step on given gradients       training   forward, backward and step of a real model
    methods   the optimizers of a step          against    an optimizer from a user's file
    gradients synthetic gradients               clock      timing, and the order of methods
    traffic   collectives and their bytes       memory     the peak of what a step allocates
    summary   medians and ratios                machine    the hardware and software of a run
    samples   the measurements of one method    capture    whether a step can be a CUDA graph
    shapes    the parameters of a step          report     the result as data and JSON
    table     the result as tables

Importing this package imports nothing else.
"""
