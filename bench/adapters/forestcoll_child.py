"""Runs in ForestColl's process: hands its packer a graph and writes down the trees that it gives.

Only the standard library is imported besides the checkout, so that nothing of ours counts in its time. It is
asked twice, as ours is (`bench.adapters.answer.without_repeat`). By hand: `python
bench/adapters/forestcoll_child.py CHECKOUT QUESTION.json ANSWER.json 10`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any


def main() -> None:
    """Ask: the question has `links` [from, to, capacity] and `ranks`; see `forestcoll.py`."""
    checkout, question, answer, longest = sys.argv[1:]
    sys.path.insert(0, checkout)
    networkx = import_module("networkx")
    packer = import_module("pipeline_allgather")
    asked = json.loads(Path(question).read_text())

    def call() -> tuple[Any, float]:
        graph = networkx.DiGraph()
        for source, target, capacity in asked["links"]:
            graph.add_edge(source, target, capacity=capacity)
        start = time.perf_counter()
        found = packer.optimal_pipeline_spanning_trees(graph, compute_nodes=asked["ranks"])
        return found, time.perf_counter() - start

    ((time_units, units), (trees, counts)), seconds = call()
    found = {
        "call_seconds": seconds,
        "time_units": time_units,
        "units": units,
        "trees": [
            {"root": root, "count": counts[root, index], "paths": paths}
            for (root, index), paths in trees.items()
        ],
    }
    if seconds < float(longest):
        again, cpu_again = time.perf_counter(), time.process_time()
        _, found["call_seconds"] = call()
        found["repeat_seconds"] = time.perf_counter() - again
        found["repeat_cpu_seconds"] = time.process_time() - cpu_again
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
