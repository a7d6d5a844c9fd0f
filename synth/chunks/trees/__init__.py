"""The exact limit of R/C in S steps: packings of trees in the time-expanded graph, by column generation.

`column_generation` is the entry, over `step_master`; `pricing` finds the cheapest trees, `spanning` those to
many ranks, and `insertion` cheap ones; `tree_schedule`, `whole_trees` and `rounding` make schedules with few
chunks of a packing.
"""
