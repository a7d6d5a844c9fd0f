"""Parts of a long bench that are kept, so that it can be run a few minutes at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arborcast.bench.harness.standing import Standing, standing
from arborcast.synth.formats.results import provenance


def kept(
    folder: Path | None,
    name: str,
    code: Sequence[str],
    make: Callable[[], Mapping[str, Any]],
    *,
    is_whole: Callable[[Mapping[str, Any]], bool],
    older: bool = False,
) -> Mapping[str, Any]:
    """What `make` gives, or what a run of the same code has kept in a folder.

    Args:
        folder: made where it is missing; None to keep nothing.
        name: of the part; any text.
        code: the folders of code that the part depends on.
        make: the part as JSON can hold it.
        is_whole: whether it is worth keeping.
        older: whether a part of older code is taken, too.

    Returns:
        The part; its `code` is that of the run that made it.
    """
    origin = provenance(code)
    if folder is None:
        return {**make(), "code": origin}
    path = folder / f"{name}.json".translate(str.maketrans(":,= /", "_____"))
    if path.exists():
        part: dict[str, Any] = json.loads(path.read_text())
        if older or standing(part) == Standing():
            return part
    found = {**make(), "code": origin}
    if is_whole(found):
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    return found
