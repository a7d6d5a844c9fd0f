"""A schedule as one program per rank that cannot deadlock.

`lower` is the entry; `layout` says where chunks lie in a buffer. Imports `synth` only, and no torch.
"""
