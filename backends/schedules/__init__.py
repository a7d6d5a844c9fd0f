"""Which schedules serve a process group: fabric, synthesis on one rank, exchange, the table by size.

Imports `synth` and `lowering`.
"""
