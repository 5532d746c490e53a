"""Compares low-communication methods, tuned by one rule, in simulation, with exact byte counts.

methods/   a class per method, and their names     studies    the entries that each study compares
run        one run, from start to end              tuning     the runs that are still missing
store      the file of runs                        figures    from runs to means, spreads and curves
report     a Markdown table                      __main__   the command
"""
