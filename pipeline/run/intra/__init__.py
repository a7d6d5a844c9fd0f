"""Runs a stage as its sharding says: every rank its parts, with exactly the collectives that were planned.

`collectives` carries out the plan's paths along the axes of the mesh; `operators` runs one operator of
torch on parts; `stage` puts them together, with parameters as `DTensor`s; `loop` runs its passes in order and
exchanges parts with the stages before and behind; `trainer` trains all stages of a plan.

`DTensor`'s own dispatch would choose strategies and collectives for itself; here the integer program did.
"""
