"""`demopt doctor`: finds obstacles to a run between machines, before the run."""
