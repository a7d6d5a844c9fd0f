"""Programs for other runtimes: out of our schedules, in from anybody's files, checked and interpreted.

    program = export_program(schedule, size_bytes=1 << 20)      # blocks, steps, dependencies within all limits
    text = msccl.write(program)                                 # and `msccl.read(text)` the other way
    verdict = check_program(program, topology=fabric)           # shares no code with the export

`program` has the values that all of it speaks of. `limits` is what runtimes can hold, `export` makes programs
of schedules, `msccl` reads and writes that runtime's files, `checking` proves a program right or shows why
not, `interpreter` runs it on numpy arrays, `as_schedule` goes back. No torch.
"""
