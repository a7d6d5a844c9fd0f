"""Schedules as programs of thread blocks.

`export` is the entry (units, channels, limits); `logical` says who does what to which chunks, `blocks` in
which thread block. What comes out has passed `checking`.
"""
