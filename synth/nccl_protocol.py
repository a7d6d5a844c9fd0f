"""The protocols of NCCL's messages, which its planning model and programs for its kind of runtime know."""

from __future__ import annotations

from enum import StrEnum


class Protocol(StrEnum):
    """How a receiver knows that data has come.

    `Simple` by slots and counters, a chunk at a time; `LL` by flags in every 8 bytes, `LL128` in every 128.
    """

    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"
