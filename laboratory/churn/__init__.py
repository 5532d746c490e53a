"""The cost of a loss of workers: a run whose workers are killed at named instants, beside a calm one.

members    the workers: demopt under torchft, torchft's DDP, and a run that restarts as a whole
__main__   kills them, replaces them, and measures the pauses and losses
"""
