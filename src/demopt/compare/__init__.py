"""`demopt compare`: low-communication methods side by side, each tuned alike, in simulation, with exact bytes.

methods/   one class a method, as `simulate.method.Method`      catalogue  their names, rules of bytes and sources
studies    what is compared with what                           scale      model, data, steps, workers
run        one run, start to end: a line of runs.jsonl          store      that file
sweep      which runs are still missing                         schedule   doing them, in one or more processes
results    runs to figures, and the Pareto front                links      bytes to seconds
figures, page, table: what is shown                             command    the flags
"""
