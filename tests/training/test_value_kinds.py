"""What kind of value operators make, on drawn graphs and against RaNNC's sentence, word by word."""

from __future__ import annotations

from itertools import product

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from arborcast.pipeline.model.traced.value_kinds import TracedOperator, ValueKind, kind_of, kinds

B, P, L, C = ValueKind.BATCH, ValueKind.PARAMETER, ValueKind.LOSS, ValueKind.CONSTANT


def drawn(text: str) -> list[TracedOperator]:
    """Operators from lines `value = inputs`; a value with a star is a scalar, `!x` is changed in place."""
    operators = []
    for line in text.strip().splitlines():
        value, inputs = (side.split() for side in line.split("="))
        operators.append(
            TracedOperator(
                value[0].rstrip("*"),
                tuple(name.lstrip("!") for name in inputs),
                scalar=value[0].endswith("*"),
                changes=tuple(name[1:] for name in inputs if name.startswith("!")),
            )
        )
    return operators


def test_the_graph_of_the_source() -> None:
    """Training example and label, a parameter, a loss behind both."""
    found = kinds(
        drawn("""
            v1    = in1 p
            v2    = v1
            v3*   = v2 in2
            out*  = v3
        """),
        batch=["in1", "in2"],
        parameters=["p"],
    )
    assert found == {"in1": B, "in2": B, "p": P, "v1": B, "v2": B, "v3": L, "out": L}


@pytest.mark.parametrize(
    ("inputs", "scalar", "kind"),
    [
        ([B], False, B),
        ([B, P], False, B),
        ([B, B], False, B),  # two batches, several dimensions: a residual sum
        ([B, B], True, L),
        ([B, B, C], True, L),
        ([B], True, B),  # a mean over one batch
        ([L], True, L),
        ([L, P], True, L),  # a loss and a penalty
        ([L, C], False, L),
        ([L, B], False, B),
        ([L, B, B], True, L),
        ([P], False, P),
        ([P, C], False, P),
        ([P, P], False, C),
        ([C, C], False, C),
        ([], False, C),
    ],
)
def test_each_rule(inputs: list[ValueKind], scalar: bool, kind: ValueKind) -> None:
    assert kind_of(inputs, scalar=scalar) is kind


@given(st.lists(st.sampled_from(list(ValueKind)), max_size=5), st.booleans())
def test_rules_in_the_order_of_the_sentence(inputs: list[ValueKind], scalar: bool) -> None:
    def first_that_applies() -> ValueKind:
        if scalar and sum(kind is B for kind in inputs) > 1:
            return L
        if L in inputs and B not in inputs:
            return L
        if B in inputs:
            return B
        return P if sum(kind is P for kind in inputs) == 1 else C

    assert kind_of(inputs, scalar=scalar) is first_that_applies()


def test_order_of_inputs_does_not_matter() -> None:
    for inputs in product(ValueKind, repeat=3):
        assert len({kind_of(order, scalar=True) for order in (inputs, inputs[::-1])}) == 1


def test_masks_and_positions_are_constants() -> None:
    found = kinds(
        drawn("""
            full     = one
            mask     = full
            table    = embedding mask
            x        = in table
        """),
        batch=["in"],
        parameters=["embedding"],
        constants=["one"],
    )
    assert [found[name] for name in ("full", "mask", "table", "x")] == [C, C, P, B]


def test_what_a_batch_is_written_into_is_a_batch_from_then_on() -> None:
    found = kinds(
        drawn("""
            zeros   = size
            early   = zeros
            write   = !zeros in
            late    = zeros
            tick    = !count size
        """),
        batch=["in"],
        constants=["size", "count"],
    )
    assert [found[name] for name in ("early", "write", "zeros", "late")] == [C, B, B, B]
    assert found["count"] is C
