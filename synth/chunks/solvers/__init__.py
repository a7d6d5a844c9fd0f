"""Encodings run in a child process, in turns by counted effort; answers are kept on disk by content.

`search` answers one instance, from the cache or by `portfolio`;
`refutation` writes an infeasibility as DIMACS with its DRAT proof.
"""
