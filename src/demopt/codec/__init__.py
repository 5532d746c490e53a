"""Gradients to coefficients and back: the eight steps of the algorithm for one chunk group at a time."""
