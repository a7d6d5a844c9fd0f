"""One configuration on one backend, in this process and its children: a line of JSON for each test."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from arborcast.bench.suite.cases import CONFIGURATIONS, run_cases


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configuration", choices=[one.name for one in CONFIGURATIONS])
    parser.add_argument("backend")
    parser.add_argument("--only", default="", help="a part of the names of tests")
    parser.add_argument("--deadline", type=float, default=120.0, metavar="S", help="for each test")
    asked = parser.parse_args()
    configuration = next(one for one in CONFIGURATIONS if one.name == asked.configuration)
    for name, ending in run_cases(configuration, asked.backend, only=asked.only, deadline_s=asked.deadline):
        print(json.dumps({"test": name, **asdict(ending)}), flush=True)


if __name__ == "__main__":
    main()
