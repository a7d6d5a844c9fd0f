"""Trees that join and fork at switches that reduce or multicast (SHARP, NVLS): all that is known of them.

`program` finds the best trees by column generation: `pricing` the cheapest under prices, `spanning` cheap
ones at any size; `steiner_tree` says what a tree is. `limits` makes certificates of the prices, `schedules`
schedules of the trees; `symmetric` does both by orbits.
"""
