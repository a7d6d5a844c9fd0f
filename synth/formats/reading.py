"""Text from files of unknown origin, and JSON out of it: limits first, then one line for whatever is wrong.

Every reader of files (schedules, topologies, saved command output) starts here.
"""

from __future__ import annotations

import contextlib
import gc
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import parse_number, shorten

_GZIP = b"\x1f\x8b"
"""How compressed files begin, and no text does."""


def read_text(path: Path | str, *, max_bytes: int) -> str:
    """The text of a UTF-8 file of at most `max_bytes`, compressed by gzip or not.

    Raises:
        InputError: it does not exist, is a directory, cannot be read, is too large, or is no text.
    """
    try:
        with Path(path).open("rb") as file:
            # One byte more than allowed tells; sizes asked of the file system are zero for pipes.
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{shorten_path(path)}: cannot be read: {reason}") from error
    except MemoryError as error:
        raise InputError(f"{shorten_path(path)}: does not fit into memory") from error
    if data[: len(_GZIP)] == _GZIP:
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
                data = packed.read(max_bytes + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{shorten_path(path)}: must be whole as a gzip file: {error}") from error
    if len(data) > max_bytes:
        raise InputError(f"{shorten_path(path)}: must be at most {max_bytes} bytes, got more")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shorten_path(path)}: must be UTF-8 text, got byte {data[error.start]:#04x} at {error.start}"
        ) from error
    if "\0" in text:
        raise InputError(f"{shorten_path(path)}: must be text, got a NUL byte at {text.index(chr(0))}")
    return text


def head_of(path: Path | str, most: int) -> str:
    """The first bytes of a file as text, to see what it is; empty where it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(most).decode(errors="replace")
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return ""


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """No search for cycles of garbage meanwhile.

    What files are made into has no cycles, and looking for some among millions of new values takes as long as
    making them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def shorten_path(path: Path | str) -> str:
    """A path on one line, for error messages."""
    text = str(path)
    return text if text.isprintable() and len(text) <= 300 else shorten(text, 300)


def parse_json(text: str, place: str) -> object:
    """Plain values out of JSON text; decimals become exact Fractions.

    Raises:
        InputError: not JSON, a key twice in one object, nested too deep, NaN, a number too long.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_without_repeats, parse_float=_exact, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        raise InputError(
            f"{place}: line {error.lineno}, column {error.colno}: must be JSON: {error.msg}"
        ) from error
    except RecursionError as error:
        raise InputError(f"{place}: must not be nested this deep") from error
    except ValueError as error:
        # A number of thousands of digits makes int() raise; its text speaks of interpreter settings.
        rule = "whole numbers must have fewer digits" if "set_int_max" in str(error) else str(error)
        raise InputError(f"{place}: {rule}") from error


def check_format(document: object, known: Sequence[str], place: str) -> str:
    """The format that a document says it is of, one of some.

    Raises:
        InputError: it says none of them, or nothing.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, str) or found not in known:
        raise InputError(f"{place}: format: must be {' or '.join(known)}, got {shorten(found)}")
    return found


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        repeated, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {shorten(repeated)} must stand once in its object, got it more often")
    return mapping


def _exact(text: str) -> Fraction:
    return parse_number(text)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"numbers must be finite, got {name}")
