"""What a stage keeps, recomputes or offloads: brute force, a replay of its passes, and drawn choices."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborcast.pipeline.costs.saved_bytes import (
    Segment,
    Treatment,
    described,
    extra_us,
    held_bytes,
    merged,
)
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.planning.activation_search import ActivationOptions, MemoryBudget, Units
from arborcast.pipeline.planning.tables import LayerTables
from arborcast.pipeline.profiles import Layer, Profile
from tests.support.planning_cases import every_choice

KEEP, RECOMPUTE, OFFLOAD = Treatment


@st.composite
def models(draw, most=6):
    """Layers that save what they take in, and more; for one sample."""
    layers, taken = [], draw(st.integers(0, 9))
    for index in range(draw(st.integers(1, most))):
        handed = draw(st.integers(0, 9))
        saved = taken + draw(st.integers(0, 30))
        forward, backward = draw(st.integers(1, 9)), draw(st.integers(1, 18))
        layers.append(Layer(f"{index}", float(forward), float(backward), handed, saved, 0, 0))
        taken = handed
    return Profile("drawn", 1, tuple(layers))


def replayed_bytes(profile, units, samples, microbatches):
    """The most that a stage holds, tensor by tensor: forward, then backward in the order of the forwards.

    What a layer takes in and what else it saves are tensors of their own, so that each is there or not.
    """
    start = units[0].start
    there: dict[tuple[int, int, str], int] = {}
    most = 0

    def tensors(microbatch, unit):
        for layer in range(unit.start, unit.end):
            taken = profile.layers[layer - 1].output_bytes if layer else 0
            yield (microbatch, layer, "taken"), taken * samples
            yield (microbatch, layer, "rest"), (profile.layers[layer].saved_bytes - taken) * samples

    def note():
        nonlocal most
        most = max(most, sum(there.values()))

    def stays(unit, name):
        _, layer, what = name
        if unit.treatment is KEEP:
            return True
        if unit.treatment is OFFLOAD:
            return what == "taken" and layer == start
        return what == "taken" and layer == unit.start

    def leave(microbatch, unit):
        for name, _ in tensors(microbatch, unit):
            if name in there and not stays(unit, name):
                del there[name]

    for microbatch in range(microbatches):
        before = None
        for unit in units:
            for name, size in tensors(microbatch, unit):
                if unit.treatment is not RECOMPUTE or stays(unit, name):
                    there[name] = size
            note()
            if before is not None:
                leave(microbatch, before)  # its copy went out meanwhile
            before = unit
        leave(microbatch, before)
        note()
    for microbatch in range(microbatches):
        for index in range(len(units) - 1, -1, -1):
            there.update(tensors(microbatch, units[index]))
            if index and units[index - 1].treatment is OFFLOAD:
                there.update(tensors(microbatch, units[index - 1]))  # on its way back
            note()
            for name, _ in tensors(microbatch, units[index]):
                del there[name]
    assert not there
    return most


@given(models(), st.integers(1, 3), st.integers(1, 4), st.data())
@settings(max_examples=60)
def test_a_replay_of_the_passes_holds_as_much(profile, samples, in_flight, data):
    units = data.draw(st.sampled_from(list(every_choice(0, profile.depth, ActivationOptions(True, 1.0)))))
    start = data.draw(st.integers(0, len(units) - 1))
    own = units[start:]
    found = held_bytes(profile, merged(own), samples, in_flight)
    assert found == held_bytes(profile, own, samples, in_flight)
    assert found == replayed_bytes(profile, own, samples, in_flight)


@given(
    models(most=5),
    st.sampled_from(
        [
            ActivationOptions(True),
            ActivationOptions(False, 0.001),
            ActivationOptions(True, 0.0005),
            ActivationOptions(True, 0.004),
        ]
    ),
    st.integers(1, 3),
    st.integers(1, 5),
    st.data(),
)
@settings(max_examples=120)
def test_the_choice_is_that_of_brute_force(profile, menu, share, in_flight, data):
    start = data.draw(st.integers(0, profile.depth - 1))
    end = data.draw(st.integers(start + 1, profile.depth))
    choices = list(every_choice(start, end, menu))
    needs = {it: held_bytes(profile, it, share, in_flight) for it in choices}
    limit = data.draw(st.integers(max(min(needs.values()) - 3, 0), max(needs.values())))
    times = {it: sum(extra_us(profile, it, share / 2, menu.offload_gbps)) for it in choices}
    best = min((times[it] for it in choices if needs[it] <= limit), default=None)
    units = Units(profile, menu, share, share / 2)
    found = units.choice(start, end, in_flight, limit)
    if best is None:
        assert found is None
    else:
        assert found is not None and found.extra_us == pytest.approx(best)
        assert held_bytes(profile, found.segments, share, in_flight) <= limit
        ours = sum(extra_us(profile, found.segments, share / 2, menu.offload_gbps))
        assert ours == pytest.approx(best)
    least = units.least_memory(start, end, in_flight)
    assert held_bytes(profile, least, share, in_flight) == min(needs.values())


@given(models(most=2), st.lists(st.integers(0, 1), min_size=3, max_size=5), st.integers(0, 90))
@settings(max_examples=25)
def test_equal_stages_share_a_choice(profile, kinds, limit):
    """What was found for other layers of the same costs is what is found for these alone."""
    kinds = [min(it, profile.depth - 1) for it in kinds]
    equal = tuple(replace(profile.layers[it], name=f"{at}") for at, it in enumerate(kinds))
    repeated = replace(profile, layers=equal)
    tables, menu, room = LayerTables(repeated), ActivationOptions(True, 0.002), MemoryBudget(1, 0.5, 2, limit)
    for start, end in combinations(range(repeated.depth + 1), 2):
        alone = Units(repeated, menu, room.share, room.samples).choice(start, end, 2, limit)
        assert tables.choice(start, end, menu, room) == alone


def drawn(treatments, lengths):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return tuple(Segment(a, b, it) for it, a, b in zip(treatments, bounds, bounds[1:], strict=False))


def test_a_copy_hides_behind_the_next_layer():
    """8 bytes at 2 bytes a us take 4 us: hidden by 4 and 9 us of the layer behind, of nothing at the end."""
    profile = Profile("two", 1, tuple(Layer(f"{i}", 4.0, 9.0, 2, 8, 0, 0) for i in range(2)))
    assert extra_us(profile, drawn([OFFLOAD, KEEP], [1, 1]), 1, 0.002) == (0.0, 0.0)
    assert extra_us(profile, drawn([KEEP, OFFLOAD], [1, 1]), 1, 0.002) == (4.0, 4.0)
    assert extra_us(profile, drawn([OFFLOAD, KEEP], [1, 1]), 1, 0.001) == (4.0, 0.0)


def test_another_treatment_is_refused():
    assert Segment(0, 1, "keep") == Segment(0, 1, KEEP)
    with pytest.raises(PlanError, match="must be one of keep, recompute, offload, got drop"):
        Segment(0, 1, "drop")


def test_in_words():
    assert described(drawn([KEEP, RECOMPUTE, RECOMPUTE, OFFLOAD], [3, 2, 1, 1])) == (
        "keep 3, recompute 2+1, offload 1"
    )
