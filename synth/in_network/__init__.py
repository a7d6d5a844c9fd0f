"""Trees that join and fork at switches that reduce or multicast (SHARP, NVLS): all that is known of them.

`steiner_program` finds the best trees by column generation: `steiner_pricing` the cheapest under prices,
`switch_trees` cheap ones at any size; `steiner_tree` says what a tree is. `switch_limits` makes
certificates of the prices, `switch_schedules` schedules of the trees; `symmetric` does both by orbits.
"""
