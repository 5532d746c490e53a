"""Machines on one computer, joined by links of a given speed and latency that can be cut.

    machines     network namespaces on a bridge         delay_box.c   latency
    scenario     a command on each machine
    race         time to the same loss on each link     steps         seconds of steps on real ranks
    homes        a run through a store, between machines that reach nothing else

Takes Linux, root, ip, tc, bridge and, for latency, a C compiler.
"""
