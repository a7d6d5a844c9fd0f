"""`forked_ranks.py --standalone --nproc-per-node N SCRIPT`: ranks with the environment that torchrun gives.

They are forked from one process that has imported torch, so that what pages start takes a third of the time
in `make test`. `make test-all` runs the same by torchrun itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import arborcast.torch_backend  # noqa: F401
from tests.support.ranks import rendezvous


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("script")
    given = parser.parse_args()
    if "optim." in Path(given.script).read_text(encoding="utf-8"):
        import torch._dynamo  # noqa: F401  # with the first optimizer, for three seconds
    forks = multiprocessing.get_context("fork")
    with rendezvous(given.nproc_per_node) as environ:
        ranks = [
            forks.Process(target=be_rank, args=(rank, given.script, environ))
            for rank in range(given.nproc_per_node)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def be_rank(rank: int, script: str, environ: dict[str, str]) -> None:
    os.environ.update(environ, RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
