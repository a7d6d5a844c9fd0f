"""Runs a stage as its sharding says: every rank its parts, with exactly the collectives that were planned.

`routes` says how each value gets to its readers; `mesh_collectives` carries that out along the axes of the
mesh; `divided_operators` runs one operator of torch on parts; `constants` holds what no sample changes;
`divided_pass` takes one microbatch through all operators; `divided_stage` puts them together, with
parameters as `DTensor`s; `slice_messages` exchanges parts with the stages before and behind; `stage_contents`
says what each stage of a plan holds; `divided_model` makes of them what a trainer trains.

`DTensor`'s own dispatch would choose strategies and collectives for itself; here the integer program did.
"""
