"""A run is a folder: workers exchange their messages through a disk or a bucket. docs/folder.md has the protocol.

store (four calls) < key < log (the objects of a run) < stop, open round < checkpoints < weights (joining, rounds) <
exchange < replay.
"""
