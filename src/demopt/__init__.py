"""Decoupled Momentum Optimization (DeMo): data-parallel training over slow networks."""
