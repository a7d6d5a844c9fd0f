"""The exact limit of R/C in S steps: packings of trees in the time-expanded graph, by column generation.

`column_generation` is the entry, over `step_master`; `pricing`, `spanning_oracle` and `insertion` find trees;
`tree_schedule`, `whole_trees` and `rounding` make schedules with few chunks of a packing.
"""
