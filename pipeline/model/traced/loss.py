"""Where the loss of a model that computes it itself begins, as a pure function over its operators in order.

    input_ids  | embed  block  block  head |  view  cross_entropy        stages end at the head's output
    labels ----------------------------------  pad  view ----^           and never see the labels

The last stage hands what the loss is made of to the loss, which reads labels straight from the batch. What is
cheap belongs to the loss, where it is seen whether samples are compared with each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from arborcast.pipeline.model.traced.cut_points import Item


def without_loss(
    items: Sequence[Item],
    inputs: Sequence[Item],
    parameters: Collection[str],
    cheap: Collection[str],
    loss: str,
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The operators of the stages, and the values that the loss is made of.

    Those are the last batch values with a sample dimension that take more than cheap operators to make, and
    that no label comes into. A label is an input from which nothing is made but by cheap operators.

    Args:
        items: of the whole model, in order, all of them for its loss.
        inputs: of the model.
        parameters: names of the model's parameters.
        cheap: names of operators without arithmetic to speak of, which draw no random numbers. Those that
            read parameters or change something do not count as such here.
        loss: name of the loss.
    """
    known = {item.name: item for item in items}
    light = {
        it.name for it in items if it.name in cheap and not (it.changes or set(parameters) & {*it.inputs})
    }
    trained, labelled = _trained(items, parameters), _labelled(items, inputs, light)
    alone: set[str] = set()
    ends: set[str] = set()
    waiting = [loss]
    while waiting:
        item = known.get(waiting.pop())
        if item is None or item.name in alone | ends:
            continue
        crosses = item.varies and item.sample_dim is not None and item.name != loss
        if crosses and item.name in trained and item.name not in light | labelled:
            ends.add(item.name)
        else:
            alone.add(item.name)
            waiting += item.inputs
    needed = set(ends)
    for item in reversed(items):
        if item.name in needed or item.name not in alone:
            needed |= {item.name, *item.inputs}
    kept = tuple(item for item in items if item.copied or item.name in needed)
    return kept, tuple(item.name for item in items if item.name in ends)


def _trained(items: Sequence[Item], parameters: Collection[str]) -> set[str]:
    """What is made of parameters."""
    found = set(parameters)
    for item in items:
        if not found.isdisjoint(item.inputs):
            found.add(item.name)
    return found


def _labelled(items: Sequence[Item], inputs: Sequence[Item], light: Collection[str]) -> set[str]:
    """Labels, and what is made of them."""
    found: set[str] = set()
    for given in inputs:
        cone = {given.name}
        for item in items:
            if not cone.isdisjoint(item.inputs):
                if item.name not in light:
                    break
                cone.add(item.name)
        else:
            found |= cone
    return found
