"""Why a model could not be traced, in one line: which construct, where in the user's code, and what to do.

torch tells it in many lines and many classes of errors; the place is the last frame of the traceback that
lies neither in torch nor here.
"""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import nn

from pipeline.errors import PartitionError

REMEDY = (
    "rewrite it with tensor operations, divide the model by hand (pipeline.Divisible), or, if it is an "
    'nn.Sequential, pass fallback="sequential"'
)
_OPERATOR = re.compile(r"\b[a-z_]\w*\.\w+\.(?:default|[A-Z]\w*)\b|\b[a-z_]\w*::\w+")
"""As torch writes them: aten.add.Tensor, mylib::fused."""
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def tracing_error(model: nn.Module, error: BaseException) -> PartitionError:
    """The error that says in one line why torch.export failed."""
    return PartitionError(f"model {type(model).__name__}: cannot be traced{_place(error)}: {_reason(error)}")


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), kind).rstrip(".")
    operator = _OPERATOR.search(text)
    if "Constraints violated" in text or kind == "ConstraintViolationError":
        return _fixed_samples(text)
    if kind == "UnsupportedOperatorException" or "no fake impl registered" in text:
        return (
            f"operator {operator.group() if operator else first} has no shape function; register one with "
            "torch.library.register_fake"
        )
    if kind in ("DataDependentOutputException", "DynamicOutputShapeException"):
        name = operator.group() if operator else first
        return f"what {name} returns depends on the values of a tensor; {REMEDY}"
    if "data-dependent" in text.lower():
        return f"control flow depends on the values of a tensor; {REMEDY}"
    return f"{kind}: {first}; {REMEDY}"


def _fixed_samples(text: str) -> str:
    fixed = re.search(r"constant \((\d+)\)|specialized.*?\((\d+)\)|== (\d+)", text)
    number = next((group for group in fixed.groups() if group), None) if fixed else None
    allows = f"allows only {number} samples" if number else "restricts the number of samples"
    return f"it {allows}; take the number from the input's shape instead"


def _place(error: BaseException) -> str:
    """The last line of the user's own code on the way to the error, "" where there is none."""
    seen: BaseException | None = error
    while seen is not None:
        frames = [
            frame
            for frame in traceback.extract_tb(seen.__traceback__)
            if not frame.filename.startswith((_TORCH, _HERE, "<"))
        ]
        inside = [frame for frame in frames if frame.name != "<module>" and _in_forward(frame, seen)]
        if inside:
            frame = inside[-1]
            line = linecache.getline(frame.filename, frame.lineno or 0).strip()
            return f" at {Path(frame.filename).name}:{frame.lineno}" + (f" ({line})" if line else "")
        seen = seen.__cause__ or seen.__context__
    return ""


def _in_forward(frame: traceback.FrameSummary, error: BaseException) -> bool:
    """Whether a frame lies below torch.export, that is, in the model."""
    frames = list(traceback.extract_tb(error.__traceback__))
    exported = next((i for i, it in enumerate(frames) if it.filename.startswith(_TORCH)), len(frames))
    return any(
        it is frame or (it.filename, it.lineno) == (frame.filename, frame.lineno) for it in frames[exported:]
    )
