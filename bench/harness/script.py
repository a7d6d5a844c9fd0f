"""What all scripts of bench/ do alike: a command line, a file that is kept, one line for what goes wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arborcast.bench.harness.document import write_document
from arborcast.synth.errors import InputError

KEPT = Path(__file__).resolve().parents[1] / "results"
"""The folder of what is measured whole; README and docs/figures.md are made from it."""


class CannotMeasureError(Exception):
    """The machine refused something; the message is its own, in one line."""


def command_line(about: str | None, results: Path | None = None) -> argparse.ArgumentParser:
    """A command line.

    Args:
        about: a script's docstring; its first line is shown.
        results: where rows go unless `--json` names another file; None for no such option.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    if results is not None:
        parser.add_argument("--json", type=Path, metavar="PATH", default=results, help="where the results go")
    return parser


def ranks_and_runs(parser: argparse.ArgumentParser, ranks: list[int], runs: int) -> argparse.Namespace:
    """Read the command line, with options for numbers of local ranks and of rounds, at least 2 and 5."""
    parser.add_argument("--ranks", type=int, nargs="+", default=ranks, help="numbers of processes")
    parser.add_argument("--runs", type=int, default=runs, help="measured rounds, after those that warm up")
    arguments = parser.parse_args()
    if arguments.runs < 5:
        parser.error(f"--runs {arguments.runs}: a median needs at least 5")
    if min(arguments.ranks) < 2:
        parser.error(f"--ranks {min(arguments.ranks)}: must be at least 2")
    return arguments


def keep(path: Path | None, found: Mapping[str, Any], *, is_part: bool = False) -> None:
    """Write a results file and say so.

    Args:
        path: of the file; None for none.
        found: what it holds.
        is_part: whether only some of the questions were asked: that replaces no file of the whole set.

    Raises:
        InputError: it cannot be written.
    """
    if path is None:
        return
    if is_part and path.parent == KEPT:
        print("not written: a part of the questions; --json PATH keeps it")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_document(path, found)
    print(f"written: {path}")


@contextmanager
def one_line(script: str) -> Iterator[None]:
    """What goes wrong inside is told in one line; the exit status is 2 for input, 1 for the machine."""
    try:
        yield
    except (InputError, CannotMeasureError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except ModuleNotFoundError as missing:
        if str(missing.name).startswith("arborcast"):
            raise
        print(f"{script}: needs {missing.name}, which `make install` brings", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
