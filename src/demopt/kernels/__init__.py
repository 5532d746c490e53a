"""Fused versions of multi-pass `core` functions, tested against them and used for the chunk groups that they cover."""
