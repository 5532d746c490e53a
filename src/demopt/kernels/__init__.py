"""Fused versions of what `core` does in many passes, each tested against it; used where they cover a bucket."""
