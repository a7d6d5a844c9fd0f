"""A schedule as one program per rank that cannot deadlock.

`lower` is the entry; `layout` says where chunks lie in a buffer, `groups` which messages start together.
Imports `synth` only, and no torch.
"""
