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
from torch import fx, nn

from arborcast.pipeline.errors import PartitionError

REMEDY = (
    "rewrite it with tensor operations, or divide the model by hand (pipeline.Divisible; for an "
    "nn.Sequential, Divisible(*model))"
)
_OPERATOR = re.compile(r"\b[a-z_]\w*\.\w+\.(?:default|[A-Z]\w*)\b|\b[a-z_]\w*::\w+")
"""As torch writes them: aten.add.Tensor, mylib::fused."""
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = str(Path(torch.__file__).parent)
_NOT_USERS = (_TORCH, str(Path(__file__).parent), "<")


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
    """The last line of the user's own code on the way to the error, "" where torch does not tell."""
    seen: BaseException | None = error
    while seen is not None:
        frames = list(traceback.extract_tb(seen.__traceback__))
        below = next(
            (index for index, it in enumerate(frames) if it.filename.startswith(_TORCH)), len(frames)
        )
        found = [(it.filename, it.lineno or 0) for it in frames[below:]]
        # Where no code of the user runs any more, torch tells the place in words.
        found += [(file, int(line)) for file, line in _FRAME.findall(str(seen))]
        users = [index for index, place in enumerate(found) if not place[0].startswith(_NOT_USERS)]
        if users:
            inner = [place for place in found[users[-1] :] if _is_layer(place[0])]
            return f" at {_line(*found[users[-1]])}" + (f", in torch's {_line(*inner[-1])}" if inner else "")
        seen = seen.__cause__ or seen.__context__
    return ""


def line_of(node: fx.Node) -> str:
    """The last line of the user's own code that made an operator of a graph, "" where torch does not tell."""
    places = [(file, int(line)) for file, line in _FRAME.findall(str(node.meta.get("stack_trace", "")))]
    users = [place for place in places if not place[0].startswith(_NOT_USERS)]
    return f" at {_line(*users[-1])}" if users else ""


def _line(file: str, number: int) -> str:
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f" ({text})" if text else "")


def _is_layer(file: str) -> bool:
    """Whether it is torch's code of a layer, rather than what calls layers."""
    return file.startswith(f"{_TORCH}/nn/") and not file.endswith("/module.py")
