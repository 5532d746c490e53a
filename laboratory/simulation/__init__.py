"""W workers of data-parallel training on one device.

    workers      the workers, the interface of a method, and gradient averaging
    demo         DeMo and LocalDeMo
    experiment   the steps, worker after worker

The weights, messages and bytes are those of real ranks, bit for bit (tests/laboratory).
"""
