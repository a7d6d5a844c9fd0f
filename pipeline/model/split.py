"""A backward pass in two halves: first the gradients of what a stage took in, later those of its parameters.

The graph of a forward pass is left where a parameter comes in:

    input --> product --> relu --> product --> output          the first half follows the upper line back and
                 |                    |                         keeps what comes to each joint (product);
              transposed           transposed                  the second half goes from each joint down
                 |                    |
              weight               weight

Nodes on the way from a joint down to a parameter belong to nothing else, so that together both halves do what
one pass does, each node once. Torch's public graph is used for it (`next_functions`, `GradientEdge`). Where
there is no such joint, as of a parameter that two operators use or one that a Python function differentiates
together with its input, its gradient belongs to the first half.

Hooks of tensors change a gradient once. The engine gives what comes to a node from before its hooks if the
node runs, from behind them if not; and what begins at a node runs its hooks. So each joint has to run in the
first half: one below which there are only parameters for its smallest one, which is cheap, or for its only
one, which then belongs to the first half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Second: TypeAlias = list[tuple[list[GradientEdge], list[Tensor], list[Tensor]]]
"""What the second half begins with: joints, what came to them, and the parameters below."""


class SplitBackward:
    """Splits the backward passes of a stage.

    Args:
        parameters: of the stage.
        others: what stands for parameters in passes, once a pass has run forward.
    """

    def __init__(self, parameters: Iterable[Tensor], others: Callable[[], Iterable[Tensor]] = tuple) -> None:
        """Keep the nodes at which gradients add up: torch lets go of those that nobody holds."""
        self._leaves, self._others = _nodes(parameters), others

    @property
    def is_needed(self) -> bool:
        """Whether there are parameters to differentiate by."""
        return bool(self._leaves)

    def first(
        self, ends: Sequence[GradientEdge], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Second]:
        """The gradients of inputs, None of those that have none, and what `second` needs.

        Args:
            ends: of what is differentiated.
            gradients: of them; None for a single number.
            inputs: by which.
        """
        joints, direct = self._joints(ends)
        edges = [edge for joint in joints for edge in joint[0]]
        wanted = [it for it in inputs if it.requires_grad]
        by: list[GradientEdge] = [get_gradient_edge(it) for it in (*wanted, *direct)]
        by[len(wanted) : len(wanted)] = edges
        by += [get_gradient_edge(min(it, key=Tensor.numel)) for joint, it in joints if _is_last(joint, it)]
        found: list[Tensor | None] = []
        if by:
            found += torch.autograd.grad(ends, by, gradients, retain_graph=True, allow_unused=True)
        by_input = iter(found[: len(wanted)])
        came = iter(found[len(wanted) : len(wanted) + len(edges)])
        of_direct = found[len(wanted) + len(edges) :]
        for parameter, gradient in zip(direct, of_direct[: len(direct)], strict=True):
            if gradient is not None:
                _add_up(parameter, gradient)
        later: Second = []
        for own, below in joints:
            used = [(edge, it) for edge, it in zip(own, came, strict=False) if it is not None]
            if used:
                later.append(([edge for edge, _ in used], [it for _, it in used], below))
        return [next(by_input) if it.requires_grad else None for it in inputs], later

    @staticmethod
    def second(later: Second) -> None:
        """Add the gradients of parameters up."""
        while later:
            edges, gradients, parameters = later.pop()
            torch.autograd.backward(edges, gradients, inputs=parameters)

    def _joints(
        self, roots: Sequence[GradientEdge]
    ) -> tuple[list[tuple[list[GradientEdge], list[Tensor]]], list[Tensor]]:
        """Joints by their outputs, each with the parameters below, and the parameters without one."""
        above, outputs = _users([(edge.node, edge.output_nr) for edge in roots])
        below: dict[Node, list[Tensor]] = {}
        direct: list[Tensor] = []
        for leaf, parameter in (self._leaves | _nodes(self._others())).items():
            if leaf not in above:
                continue
            joint = _joint(leaf, above)
            if joint is None or _is_last([GradientEdge(joint, 0)], [parameter]):
                direct.append(parameter)
            else:
                below.setdefault(joint, []).append(parameter)
        joints = [
            ([GradientEdge(joint, number) for number in sorted(outputs[joint])], parameters)
            for joint, parameters in below.items()
        ]
        return joints, direct


def _nodes(leaves: Iterable[Tensor]) -> dict[Node, Tensor]:
    """Where the gradient of each adds up."""
    return {get_gradient_edge(it).node: it for it in leaves if it.requires_grad}


def _is_last(joint: Sequence[GradientEdge], below: Sequence[Tensor]) -> bool:
    """Whether a joint has nothing to differentiate by but the parameters below."""
    return sum(one is not None for one, _ in joint[0].node.next_functions) == len(below)


def _add_up(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient that the parameter's hooks have seen, and call those that follow its addition."""
    hooks = parameter._backward_hooks or {}
    seen = dict(hooks)
    hooks.clear()
    try:
        torch.autograd.backward(parameter, gradient)
    finally:
        hooks.update(seen)


def _users(
    roots: Sequence[tuple[Node, int]],
) -> tuple[Mapping[Node, list[Node | None]], Mapping[Node, set[int]]]:
    """Of each node who uses its outputs (None: the caller), once for each use; and which outputs are used."""
    above: defaultdict[Node, list[Node | None]] = defaultdict(list)
    outputs: defaultdict[Node, set[int]] = defaultdict(set)
    ahead: list[tuple[Node | None, Node, int]] = [(None, node, number) for node, number in roots]
    while ahead:
        user, node, number = ahead.pop()
        if node not in above:
            ahead += [(node, one, it) for one, it in node.next_functions if one is not None]
        above[node].append(user)
        outputs[node].add(number)
    return above, outputs


def _joint(leaf: Node, above: Mapping[Node, list[Node | None]]) -> Node | None:
    """Where the way up from a parameter, which nothing else takes, meets others."""
    node = leaf
    while len(above[node]) == 1:
        (user,) = above[node]
        if user is None:
            return None
        if len(user.next_functions) > 1:  # a Python function gives all gradients at once
            return None if hasattr(user, "needs_input_grad") else user
        node = user
    return None
