"""Whether a program does what its collective asks, whatever the timing; shares no code with exports.

`check` is the entry. What can be said without running a program is in `structure` (two-sided steps) and
`one_sided`: limits, buffers, who talks to whom. Then it runs once (`execution`): does it end, which accesses
does nothing order, what stands in the outputs. `two_sided_run` knows steps and FIFOs, `one_sided_run` puts
and signals. `memory` says what collectives demand of buffers.
"""
