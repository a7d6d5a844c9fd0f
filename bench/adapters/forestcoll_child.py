"""Runs in ForestColl's process: hands its packer a graph and writes down the trees that it gives.

Only the standard library is imported besides the checkout, so that nothing of ours counts in its time. By
hand: `python bench/adapters/forestcoll_child.py CHECKOUT QUESTION.json ANSWER.json`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Ask once: the question has `links` [from, to, capacity] and `ranks`; see `forestcoll.py`."""
    checkout, question, answer = sys.argv[1:]
    sys.path.insert(0, checkout)
    networkx = import_module("networkx")
    packer = import_module("pipeline_allgather")
    asked = json.loads(Path(question).read_text())
    graph = networkx.DiGraph()
    for source, target, capacity in asked["links"]:
        graph.add_edge(source, target, capacity=capacity)
    start, cpu_start = time.perf_counter(), time.process_time()
    (time_units, units), (trees, counts) = packer.optimal_pipeline_spanning_trees(
        graph, compute_nodes=asked["ranks"]
    )
    found = {
        "call_seconds": time.perf_counter() - start,
        "call_cpu_seconds": time.process_time() - cpu_start,
        "time_units": time_units,
        "units": units,
        "trees": [
            {"root": root, "count": counts[root, index], "paths": paths}
            for (root, index), paths in trees.items()
        ],
    }
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
