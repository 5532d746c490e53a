"""A scale at which a run takes less than a second."""

from demopt.compare.scale import Scale

TINY = Scale(steps=6, workers=2, batch=2, layers=1, width=32, sequence=16, warmup=2, eval_sequences=4)
