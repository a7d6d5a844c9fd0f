"""The independent check of a schedule, written out or implicit; imports values and compiled replay alone.

`verifier.verify` is the entry: the rate against the bound's certificate (`certification`), then every chunk
replayed (`replay`), or the group worked out anew from its generators and the representatives replayed
(`implicit`).
"""
