"""How plans are found, what they will cost, and what they are compared with.

`planner` lets `search` look for the fastest plan: `device_order` says in which order stages lie on ranks,
`prm` cuts layers into stages by the dynamic program over `tables`, `estimate` ranks the cuts, `memory` says
what fits, `activations` which results are recomputed or offloaded so that it does, the simulator decides.
`prediction` tells a plan's time and bound; `alternatives` (with `pipedream`, `hetpipe`, `rannc`, `spp`) has
the published ways beside it, `asynchronous` what cannot be run; `comparison` is the one call from a model
(`costing`) to all of them; `formats` reads and writes profiles and plans. Of stages that are divided over
meshes (`pipeline.sharding`), `joint` finds the best, and `sharded` sets the other ways beside them.
"""
