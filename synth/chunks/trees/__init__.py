"""The exact limit of R/C in S steps: packings of trees in the time-expanded graph, by column generation.

`column_generation` is the entry (`master`, `pricing`); `plan`, `whole_trees` and
`rounding` make schedules with few chunks of a packing.
"""
