"""Spanning-tree packings: exact, by multiplicative weights, with few trees, or limited in height.

`solver` is the entry: bound, then how links split (`splits`), then trees (`exact`, `mwu`, `fewest`,
`bounded_height`), then the schedule (`to_schedule`). All hold trees as `weighted_tree` does. `symmetric`
packs by orbits. Imports `bounds`, `lp`, `kernels`.
"""
