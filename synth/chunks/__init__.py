"""Chunk schedules: C chunks in S steps of R rounds, found by SMT, ILP or SAT (SCCL, PPoPP 2021).

`fixed_size` answers one (C, S, R), `step_solver` the least R/C of one S (of an allreduce
`allreduce.allreduce_solver`; `step_result` is what both share), `curve` all S, `frontier` a collective. They
use, from the top: `allreduce`, `trees` and `bounds` (limits), `solvers` and `encodings`, `problem`.
"""
