"""Schedules as programs of thread blocks: `logical` (who does what to which chunks), `blocks` (in which block),
`export` (the entry: units, channels, limits). What comes out is checked by `checking` before it is given away.
"""
