"""`demopt simulate`: W workers of data-parallel training on one device, with one copy of the model.

    method    the model and its W workers; how their gradients become one step; gradient averaging
    demo      DeMo on W workers                         local     LocalDeMo on W workers
    loop      the steps, worker after worker
    command   the run, with the outputs of `demopt train`

Replicas are equal after every step, so one is enough; only per-worker state, such as the momenta, is held W times.
Workers that take local steps have weights of their own, which are swapped into the model.
"""
