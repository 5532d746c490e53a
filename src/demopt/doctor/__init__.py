"""`demopt doctor`: what will be in the way of a run between machines, before the run."""
