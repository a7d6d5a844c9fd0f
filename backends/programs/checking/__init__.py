"""Whether a program does what its collective asks, whatever the timing; shares no code with exports.

`check` is the entry. A program passes `structure` (limits, buffers, who talks to whom), `progress` (does it
end, in the FIFOs there are; what waits for what if not), `order` (what happens before what, always) and
`replay` (contributor sets of every chunk, and races). `memory` says what collectives demand of buffers.
"""
