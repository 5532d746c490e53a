"""Replicas that stay equal: wirings, routes, the handshake, and `Replicator`, which both optimizers have."""
