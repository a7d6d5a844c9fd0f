"""When `make test-all` last ran, and whether the product has changed too much since.

`--record STATUS` writes the commit and the outcome of a run into `all_passed.json`; without arguments, as
`make lint` asks, the status is 1 if that run failed or if more than `MOST` lines of the product have come or
gone since. As long as no run is recorded, a line says so and the status is 0: nothing is known yet.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("all_passed.json")
PRODUCT = ("synth", "topologies", "backends", "pipeline", "arborcast")
MOST = 2000


def git(*words: str, home: Path) -> str:
    """What git says; `CalledProcessError` with its reason where it refuses."""
    ran = subprocess.run(["git", "-C", str(home), *words], capture_output=True, text=True, check=True)
    return ran.stdout.strip()


def changed(commit: str, home: Path) -> int:
    """Lines of the product that came or went since a commit; moved files count for what changed in them."""
    rows = git("diff", "--numstat", "-M", commit, "--", *PRODUCT, home=home).splitlines()
    counts = [count for row in rows for count in row.split("\t")[:2]]
    return sum(int(count) for count in counts if count != "-")  # of a binary file


def record(status: int, home: Path = HOME, file: Path = FILE) -> str:
    """Write how a run ended, if it was of a commit; returns a line about it."""
    if git("status", "--porcelain", "--", *PRODUCT, "tests", home=home):
        return "not recorded: the checkout is not at a commit"
    entry = {"commit": git("rev-parse", "HEAD", home=home), "passed": status == 0}
    file.write_text(json.dumps(entry, indent=1) + "\n")
    return f"recorded in {file.name}: commit it"


def judged(home: Path = HOME, file: Path = FILE) -> tuple[int, str]:
    """Exit status and a line."""
    if not file.exists():
        return 0, "make test-all: no run is recorded yet"
    entry = json.loads(file.read_text())
    commit = entry["commit"]
    if not entry["passed"]:
        return 1, f"make test-all failed at {commit[:12]}: mend it and run it again"
    try:
        lines = changed(commit, home)
    except subprocess.CalledProcessError as error:
        return 1, f"make test-all passed at {commit[:12]}, which this checkout lacks: {error.stderr.strip()}"
    if lines > MOST:
        since = f"{lines:,} lines of the product have changed since, the rule is at most {MOST:,}"
        return 1, f"make test-all passed at {commit[:12]}; {since}: run it again"
    return 0, f"make test-all passed at {commit[:12]}, {lines:,} changed lines ago"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", type=int, metavar="STATUS")
    status = parser.parse_args().record
    code, said = judged() if status is None else (0, record(status))
    print(said)
    return code


if __name__ == "__main__":
    sys.exit(main())
