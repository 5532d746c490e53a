"""`demopt bench`: what an optimizer step costs in time, memory and bytes, beside other optimizers in the same run.

    command   the flags                         config     all that a run is told
    launch    one team of workers after another worker     one of them
    step      the step on given gradients       training   forward, backward and step of a real model
    methods   the optimizers of a step          against    one from a file of the user's
    gradients made-up gradients                 clock      timing, and who goes when
    traffic   collectives and their bytes       memory     the peak of what a step allocates
    summary   medians and ratios                machine    what it ran on
    report    tables and JSON

Importing this package imports nothing else.
"""
