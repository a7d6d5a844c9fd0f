"""What MSCCL++'s executor can hold; of these its parser checks none, and its host code the operations alone.

Read in microsoft/mscclpp 1f5f065 (after v0.10.0): src/core/include/execution_common.hpp,
execution_kernel.hpp, src/core/executor/execution_plan.cc, executor.cc.
"""

from __future__ import annotations

OPERATIONS = 64
"""Of a thread block, those within pipelines included."""

BLOCKS = 64
"""Thread blocks of a rank that we count on to be resident at once, as they wait for each other: GPUs have
from 80
multiprocessors on, each for one block of 1024 threads. The executor has no limit of its own."""

CHANNELS = 16
"""Connections of one kind that a thread block names, and remote buffers of one kind."""

CHANNELS_OF_OPERATION = 8
BUFFERS_OF_OPERATION = 10
BARRIERS = 16
SEMAPHORES_OF_OPERATION = 16
THREADS = 1024

MOST_BYTES = (1 << 32) - 1
"""Of a buffer: offsets and sizes are kept in 32 bits."""

SCRATCH_BYTES = 64 << 20
"""Of scratch where a plan reuses resources."""

ALIGNMENT = 16
"""Bytes: buffers must be a multiple of it times their chunks."""
