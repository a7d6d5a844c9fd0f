"""Every label beside brute force, over ten thousand random fabrics."""
from __future__ import annotations

import pytest
from fuzzing.comparison import Tally, compare

BLOCKS, OF_BLOCK = 100, 100


def _none_false(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        compare(seed, tally)
    print(f"{tally.fabrics} fabrics, {sum(tally.compared.values())} labels, {len(tally.false)} false")
    assert not tally.false, "\n".join([f"{len(tally.false)} of {sum(tally.compared.values())} labels", *tally.false])
    return tally


def test_labels_of_some_fabrics():
    tally = _none_false(range(10**6, 10**6 + 40))
    assert sum(tally.compared.values()) > 150


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
def test_labels(block):
    _none_false(range(block * OF_BLOCK, (block + 1) * OF_BLOCK))
