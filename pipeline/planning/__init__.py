"""How plans are found, what they will cost, and what they are compared with.

`planner` lets `stage_search` look for the fastest plan: `device_order` says in which order stages lie on
ranks, `stage_dp` cuts layers into stages by the dynamic program over `tables`, `estimate` ranks the cuts,
`memory_need` says what fits, `activation_search` which results are recomputed or offloaded so that it does,
the simulator decides. `plan_prediction` tells a plan's time and bound; `alternatives` (with `pipedream`,
`rannc`, `spp`) has the published ways beside it, each a function of a `planning_problem`;
`plan_comparison` is the one call from a model (`costing`) to all of them; `formats` reads and writes
profiles and plans. Of stages that are divided over meshes (`pipeline.sharding`), `interop_search` finds the
best, `sharded_planning` sets the other ways beside them, `divided_prediction` tells their time and memory.
"""
