"""Allreduce searched as it is: contributions that are added on the way, without overlap.

`instance` states it, `search` and `searcher` look for a schedule, `pair_bound` and `check` prove limits,
`optimum` settles one number of steps and `frontier` all of them; `compositions` are reduce-scatter and
allgather in turn.
"""
