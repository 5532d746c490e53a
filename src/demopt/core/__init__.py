"""Functions of tensors: chunks, transforms, top-k, sums over ranks, update rules, rounding.

In all of demopt, a tensor's name ends in its shape: W ranks (nodes, with two levels), C chunks, N elements in a chunk
of r rows and c columns, K coefficients kept per chunk, B bytes (of a message, or of a chunk's signs), E elements.
"""
