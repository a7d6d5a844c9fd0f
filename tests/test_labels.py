"""Every label beside an exact reference (`fuzzing.comparison` lists them), on ten thousand random fabrics."""

from __future__ import annotations

import logging

import pytest
from fuzzing.comparison import Tally, compare

BLOCKS, OF_BLOCK = 100, 100
SOME = range(1_000_000, 1_000_060)

log = logging.getLogger(__name__)


def none_is_false(seeds: range) -> Tally:
    tally = Tally()
    for seed in seeds:
        compare(seed, tally)
    labels = sum(tally.compared.values())
    summary = f"{tally.fabrics} fabrics, {labels} labels compared, {len(tally.false)} false"
    log.info("%s; open: %s", summary, dict(tally.unknown))
    assert not tally.false, "\n".join([summary, *tally.false])
    return tally


def test_labels_of_some_fabrics():
    tally = none_is_false(SOME)
    assert sum(tally.compared.values()) > 4 * len(SOME)


@pytest.mark.long
@pytest.mark.parametrize("block", range(BLOCKS))
def test_labels_of_ten_thousand_fabrics(block):
    none_is_false(range(block * OF_BLOCK, (block + 1) * OF_BLOCK))
