"""Transfers as columns are the same values as the objects that they stand for."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from arborcast.synth.transfers import Transfer, Transfers, in_order

NUMBERS = st.integers(0, 5)
TRANSFERS = st.lists(
    st.builds(
        Transfer, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.booleans(), st.lists(NUMBERS, max_size=3).map(tuple)
    ),
    max_size=12,
).map(tuple)


def _forgetting(transfers: tuple[Transfer, ...]) -> Transfers:
    """The columns without the objects that they came from."""
    columns = Transfers.of(transfers)
    fresh: Transfers = pickle.loads(pickle.dumps(columns))
    return fresh


@given(TRANSFERS)
def test_columns_are_equal_to_the_objects(transfers: tuple[Transfer, ...]) -> None:
    columns = _forgetting(transfers)
    assert len(columns) == len(transfers)
    assert tuple(columns) == transfers
    assert columns == transfers
    assert transfers == columns
    assert hash(columns) == hash(transfers)
    assert columns[1:] == transfers[1:]
    assert columns != (*transfers, Transfer(0, 0, 1, 0))


@given(TRANSFERS)
def test_paths_are_those_of_the_hops(transfers: tuple[Transfer, ...]) -> None:
    starts, path = _forgetting(transfers).paths
    found = [tuple(part.tolist()) for part in np.split(path, starts[1:-1])] if transfers else []
    assert found == [(each.src, *each.via, each.dst) for each in transfers]


@given(TRANSFERS)
def test_columns_are_sorted_as_objects_are(transfers: tuple[Transfer, ...]) -> None:
    assert in_order(_forgetting(transfers)) == in_order(transfers)
