"""Programs for other runtimes: out of our schedules, in from anybody's files, checked and interpreted.

    program = export_program(schedule, in_place=True)  # blocks, steps, dependencies within all limits
    text = write(program)  # and `read(text)` the other way
    verdict = check_program(program)  # shares no code with the export

`program` has the values that all of it speaks of. `limits` is what runtimes can hold, `exporting` makes
programs of schedules, `msccl` reads and writes that runtime's files, `checking` proves a program right or
shows why not, `interpreter` runs it on numpy arrays, `traffic` counts what it puts on links, `as_schedule`
goes back by `whereabouts` of the data, `folder` exports a table. `mscclpp` has that runtime's plans; they
are one-sided, with a checker and an exporter of that name. `nccl_graph`, `goal`, `chakra`,
`sccl` and `jax_module`, with `stable_hlo`, are files of schedules. `formats` has a row for each. No torch.
"""
