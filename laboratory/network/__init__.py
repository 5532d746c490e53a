"""Machines on one computer, joined by links of a given speed and latency.

    machines     network namespaces on a bridge         delay_box.c   latency
    scenario     a program on each machine
    race         time to the same loss on each link     steps         seconds of steps on real ranks

Needs Linux, root, ip, tc and, for latency, a C compiler.
"""
