"""Runs a stage as its sharding says: every rank its parts, with exactly the collectives that were planned.

`routes` says how each value gets to its readers; `collectives` carries that out along the axes of the mesh;
`operators` runs one operator of torch on parts; `constants` holds what no sample changes; `passes` takes one
microbatch through all operators; `stage` puts them together, with parameters as `DTensor`s; `loop` runs its
passes in order and exchanges parts with the stages before and behind; `shares` says what each stage of a plan
holds; `trainer` trains them all.

`DTensor`'s own dispatch would choose strategies and collectives for itself; here the integer program did.
"""
