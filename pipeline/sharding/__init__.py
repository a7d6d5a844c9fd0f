"""Alpa inside a stage: how operators are divided over a mesh of ranks, priced by its own collectives.

From the question to the answer: `model.traced.operator_reader` tells a traced model as operators whose
dimensions have labels; `graph` merges cheap ones into who makes what they read, `repeats` finds equal
blocks; `fabric_prices` prices collectives on the axes of a mesh by `synth`; `specs`
says how a tensor lies on a mesh and `resharding` what it costs to change that; `setting` is all that a
choice is priced by; `strategies` lists how an operator may be divided and what it then costs;
`sharding_program` chooses among them by an integer program, `evaluation` prices any choice on its own;
`layouts` restricts the choice to data parallelism, Megatron's layout or ZeRO-3, to compare with. `slices`
makes graphs of ranges of layers; `stage_prices` tries every mesh for one at exact rates, those that may be
best again by schedules, and asks each but once; `mesh_choice` is that of a whole model as one stage. What
plans say of a stage is `pipeline.stage_sharding`; `plan_strategies` goes there and back.

All times are integers of picoseconds, rounded once per item, and all sizes bytes.
Source: Alpa (OSDI 2022), section 4.
"""
