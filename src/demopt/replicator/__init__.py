"""Replicas that stay equal: plans, routes, the handshake, and `Replicator`, which both optimizers have."""
