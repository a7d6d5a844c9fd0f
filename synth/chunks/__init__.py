"""Chunk schedules: C chunks in S steps of R rounds, found by SMT, ILP or SAT (SCCL, PPoPP 2021)."""
