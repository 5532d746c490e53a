"""`demopt compare`: compares low-communication methods, tuned by one rule, in simulation, with exact byte counts.

methods/   one class per method: a `simulate.method.Method`     catalogue  the methods' names, byte rules and sources
studies    the entries that each study compares                 scale      model, data, steps, workers
run        one run from start to end: a line of runs.jsonl      store      reads and writes runs.jsonl
sweep      which runs are still missing                         schedule   carries them out, in one or more processes
results    runs to figures, and the Pareto front                links      bytes to seconds
verdict, table, page: the output, page from template/           command    the flags
"""
