"""Allreduce searched as it is: contributions that are added on the way, without overlap.

`partial_sums` states it, `sum_formulas` and `searcher` look for a schedule,
`allreduce_solver` settles one number of steps and `allreduce_frontier` all of them; `meeting_on_links` and
`hierarchical` (over `cores`) are hierarchical allreduces, `halves` a reduce-scatter and an allgather.
"""
