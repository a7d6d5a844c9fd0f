"""How have the figures changed from commit to commit? Reads bench/results of this history, measures nothing.

`python bench/history.py` asks git for each commit that changed a results file, works out the figures of the
page's headline from the files as they were then, and keeps them in bench/results/history.json: a wheel or a
shallow clone has no history, but has this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborcast.bench.harness.document import Measure, document, write_document
from arborcast.bench.page.headline import figures
from arborcast.bench.page.results import Document
from arborcast.synth.errors import InputError

HOME = Path(__file__).resolve().parent.parent
FOLDER = "bench/results"
KEPT = "history.json"


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit that changed results.

    Attributes:
        name: its hash.
        date: when it was made, YYYY-MM-DD.
        files: the hash of each results file by its name.
    """

    name: str
    date: str
    files: Mapping[str, str]


def commits(home: Path = HOME) -> list[Commit]:
    """Every commit of the current branch that changed a results file, the oldest first.

    Raises:
        InputError: no git, or no checkout.
    """
    changed = _git(home, "log", "--reverse", "--no-merges", "--format=%H %cs", "--", f"{FOLDER}/*.json")
    return [Commit(name, date, _files(home, name)) for name, date in map(str.split, changed.splitlines())]


def _files(home: Path, commit: str) -> dict[str, str]:
    found = {}
    for line in _git(home, "ls-tree", commit, f"{FOLDER}/").splitlines():
        about, _, path = line.partition("\t")
        name = path.rpartition("/")[2]
        if name.endswith(".json") and name != KEPT:
            found[name.removesuffix(".json")] = about.split()[2]
    return found


def rows(home: Path = HOME) -> Iterator[dict[str, Any]]:
    """A row for each figure of each commit at which it is another than before.

    A file in a form that today's report does not read gives no figures; that is said on standard error.
    """
    known: dict[str, float] = {}
    read: dict[str, Document] = {}
    for commit in commits(home):
        results = {
            name: read.setdefault(blob, _document(home, name, blob)) for name, blob in commit.files.items()
        }
        for name, figure in figures(results).items():
            if known.get(name) != figure:
                known[name] = figure
                yield {"commit": commit.name[:9], "date": commit.date, "measure": name, "value": figure}


def _document(home: Path, name: str, blob: str) -> Document:
    return Document(name, json.loads(_git(home, "cat-file", "blob", blob)))


def _git(home: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(home), *arguments], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise InputError(f"git: {error.strerror}") from error
    if done.returncode != 0:
        raise InputError(f"git {arguments[0]}: {done.stderr.strip() or 'failed'}")
    return done.stdout


def main() -> None:
    """Write the history."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("-o", "--output", type=Path, default=HOME / FOLDER / KEPT)
    arguments = parser.parse_args()
    try:
        found = document(
            "How have the headline's figures changed from commit to commit?",
            rows(),
            keys=["commit", "measure"],
            measures={"value": Measure("more")},
            units={"value": "as the headline of that commit's results, worked out by today's report"},
            code=(FOLDER,),
        )
        write_document(arguments.output, found)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print("written:", arguments.output)


if __name__ == "__main__":
    main()
