"""`demopt simulate`: W workers of data-parallel training on one device, with one copy of the model.

    exchange  ranks of one process that hand each other their messages, and share what all receive
    fleet     the model and its W workers               method    how their gradients become one step: DeMo, or averaged
    loop      the steps, worker after worker            command   the run, with the outputs of `demopt train`

Replicas are equal after every step, so one is enough; only what workers hold apart, such as momenta, is held W times.
"""
