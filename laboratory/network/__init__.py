"""Machines on one computer, joined by links of a given speed and latency that can be cut.

    machines     network namespaces on a bridge         delay_box.c   latency
    scenario     a command on each machine, and faults  scenarios/    their files
    rates        the throughput of a link               collectives   seconds of single collectives
    ranks        methods on real ranks                  steps         seconds of their steps, and whole runs
    race         time to the same loss on each link: tables and pictures
    homes        a run through a store, between machines that reach nothing else

Takes Linux, root, ip, tc, bridge and, for latency, a C compiler.
"""
