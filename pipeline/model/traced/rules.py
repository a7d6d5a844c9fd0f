"""By which dimensions each operator may be divided: one rule for each kind, as labels of its dimensions.

    linear    input (.., k)  weight (n, k)  bias (n)  ->  (.., n), k summed
    softmax   input (.., whole, ..)                   ->  the same

Rules see shapes and options, never tensors. An operator without a rule works on whole tensors. What a rule
says is carried out on real tensors in `tests/sharding/test_strategies.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from arborcast.pipeline.operators import Dims

Shape = tuple[int, ...]

_MEAN = 1
"""torch's number of the mean among the reductions of losses."""

_FLOAT_BYTES = 4
"""Of statistics, which are added up in float32."""


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """An operator with the shapes of its tensors.

    Attributes:
        shapes: of the tensors that it reads, by argument; those of a list as `name.0`, `name.1`.
        options: all other arguments.
        output: the shape of what it makes; of the first where it makes several.
    """

    shapes: Mapping[str, Shape]
    options: Mapping[str, Any]
    output: Shape


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What a rule says.

    Attributes:
        inputs: labels of what is read, by argument; those left out are needed whole.
        output: labels of what is made.
        summed: labels whose parts must be added up.
        kept: arguments that the backward pass needs; "output" for the result.
        parts: of labels that may not be divided as finely as their dimensions.
        statistics: (labels, dims, bytes) of sums inside.
        is_cheap: whether it goes element by element.
        moves: whether it touches memory.
    """

    inputs: Mapping[str, Dims]
    output: Dims
    summed: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    parts: Mapping[str, int] = field(default_factory=dict)
    statistics: tuple[tuple[frozenset[str], Dims, int], ...] = ()
    is_cheap: bool = False
    moves: bool = True


Rule = Callable[[OperatorCall], RuleResult | None]


def form_of(kind: str, call: OperatorCall, *, is_pointwise: bool) -> RuleResult | None:
    """The labels of an operator; None where there is no rule for it.

    Args:
        kind: torch's name of the operator, without a trailing underscore.
        call: its shapes.
        is_pointwise: whether torch says that it goes element by element.
    """
    rule = RULES.get(kind)
    if rule is not None:
        form = rule(call)
        if form is not None:
            pairs = [
                (form.output, call.output),
                *((form.inputs[name], it) for name, it in call.shapes.items() if name in form.inputs),
            ]
            assert all(len(dims) == len(shape) for dims, shape in pairs), (kind, call, form)
        return form
    if is_pointwise:
        linear = kind in _LINEAR or (kind in ("mul", "div") and len(call.shapes) == 1)
        return _pointwise(call, frozenset() if linear else frozenset(call.shapes))
    return None


def _labels(count: int) -> tuple[str, ...]:
    return tuple(f"i{index}" for index in range(count))


def _aligned(shape: Shape, labels: Dims, whole: Shape) -> Dims:
    """Labels of a tensor that is broadcast to a whole: from the right, none where its length is another."""
    behind = zip(shape[::-1], labels[::-1], whole[::-1], strict=False)
    return tuple(label if size == full else None for size, label, full in behind)[::-1]


def _pointwise(call: OperatorCall, kept: frozenset[str] = frozenset()) -> RuleResult:
    """Dimensions are aligned at the right; those of length 1 go with all."""
    output = _labels(len(call.output))
    inputs = {name: _aligned(shape, output, call.output) for name, shape in call.shapes.items()}
    return RuleResult(inputs, output, kept=kept, is_cheap=True)


def _keeping(*kept: str) -> Rule:
    return lambda call: _pointwise(call, frozenset(kept))


def _linear(call: OperatorCall) -> RuleResult:
    front = _labels(len(call.output) - 1)
    inputs: dict[str, Dims] = {"input": (*front, "k"), "weight": ("n", "k"), "bias": ("n",)}
    return RuleResult(inputs, (*front, "n"), frozenset("k"), frozenset(("input", "weight")))


def _product(left: str, right: str, bias: str = "") -> Rule:
    """Products of matrices, with batches aligned at the right."""

    def rule(call: OperatorCall) -> RuleResult:
        first, second, made = call.shapes[left], call.shapes[right], call.output
        rows = ("m",) if len(first) > 1 else ()
        columns = ("n",) if len(second) > 1 else ()
        count = len(made) - len(rows) - len(columns)
        batch, whole = _labels(count), made[:count]
        output: Dims = (*batch, *rows, *columns)
        inputs: dict[str, Dims] = {
            left: (*_aligned(first[:-2], batch, whole), *rows, "k"),
            right: (*_aligned(second[:-2], batch, whole), "k", *columns),
        }
        if bias in call.shapes:
            inputs[bias] = _aligned(call.shapes[bias], output, made)
        return RuleResult(inputs, output, frozenset("k"), frozenset((left, right)))

    return rule


def _einsum(call: OperatorCall) -> RuleResult | None:
    """Letters are labels; none for diagonals, or where letters are left out."""
    left, arrow, right = call.options["equation"].replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or any(len(set(term)) < len(term) for term in terms):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, call.shapes.values(), strict=True):
        for letter, size in zip(term, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    inputs: dict[str, Dims] = {
        name: tuple(it if size == sizes[it] else None for it, size in zip(term, shape, strict=True))
        for term, (name, shape) in zip(terms, call.shapes.items(), strict=True)
    }
    return RuleResult(inputs, tuple(right), frozenset(sizes) - set(right), frozenset(inputs))


def _convolution(call: OperatorCall) -> RuleResult | None:
    """By samples, by channels that are made, by channels that are read; groups of channels stay together."""
    if call.options.get("transposed"):
        return None
    groups = call.options.get("groups", 1)
    space = (None,) * (len(call.output) - 2)
    kept = frozenset(("input", "weight"))
    if groups == 1:
        inputs: dict[str, Dims] = {"input": ("s", "k", *space), "weight": ("n", "k", *space), "bias": ("n",)}
        return RuleResult(inputs, ("s", "n", *space), frozenset("k"), kept)
    inputs = {"input": ("s", "n", *space), "weight": ("n", None, *space), "bias": ("n",)}
    return RuleResult(inputs, ("s", "n", *space), kept=kept, parts={"n": groups})


def _embedding(call: OperatorCall) -> RuleResult:
    """By rows of the table: each rank looks up those that it has, and the others give zeros."""
    front = _labels(len(call.output) - 1)
    inputs: dict[str, Dims] = {"weight": ("v", "n"), "indices": front}
    return RuleResult(inputs, (*front, "n"), frozenset("v"), frozenset(("indices",)))


def _attention(call: OperatorCall) -> RuleResult:
    """By samples, by heads and by positions that ask; where heads share keys, as finely as keys are."""
    query, key = call.shapes["query"], call.shapes["key"]
    front = _labels(len(query) - 2)
    asked: Dims = (*front, None, None)
    inputs: dict[str, Dims] = {"query": (*front, "s", None), "key": asked, "value": asked}
    if "attn_mask" in call.shapes:
        inputs["attn_mask"] = _aligned(call.shapes["attn_mask"], (*front, "s", None), call.output)
    parts = {name: math.gcd(*sizes) for name, *sizes in zip(front, query, key, strict=False)}
    kept = frozenset(("query", "key", "value", "output"))
    causal = {"s": 1} if call.options.get("is_causal") else {}  # later positions look at more than early ones
    return RuleResult(inputs, (*front, "s", None), kept=kept, parts=parts | causal)


def _norm_over_last(call: OperatorCall) -> RuleResult:
    """Layer norm, RMS norm: each position alone, over all of its width."""
    whole = len(call.options["normalized_shape"])
    front = _labels(len(call.output) - whole)
    dims: Dims = (*front, *(None,) * whole)
    return RuleResult({"input": dims}, dims, kept=frozenset(("input", "weight", "bias")))


def _batch_norm(call: OperatorCall) -> RuleResult:
    """By channels; by samples if the mean and variance of each channel are added up."""
    space = (None,) * (len(call.output) - 2)
    dims: Dims = ("s", "c", *space)
    inputs: dict[str, Dims] = {"input": dims, "weight": ("c",), "bias": ("c",)}
    # forward: sum and sum of squares; backward: sum of gradients and of their products with the values
    sums = (frozenset("s"), ("c",), 2 * _FLOAT_BYTES * call.output[1])
    return RuleResult(inputs, dims, kept=frozenset(("input", "weight")), statistics=(sums, sums))


def _group_norm(call: OperatorCall) -> RuleResult:
    dims: Dims = ("s", *(None,) * (len(call.output) - 1))
    return RuleResult({"input": dims}, dims, kept=frozenset(("input", "weight")))


def _softmax(call: OperatorCall) -> RuleResult:
    """Whole along its own dimension."""
    dims = list(_labels(len(call.output)))
    dims[call.options["dim"]] = None  # type: ignore[call-overload]
    return RuleResult({"self": tuple(dims)}, tuple(dims), kept=frozenset(("output",)))


def _cross_entropy(call: OperatorCall) -> RuleResult:
    """By samples; by classes if maximum, sum and the score of the target are agreed on for each sample.

    Of a mean the samples that count are added up first.
    """
    shape = call.shapes["self"]
    rest = _labels(len(shape))[2:]
    front: Dims = ("s", *rest) if len(shape) > 1 else ()
    scores: Dims = ("s", "v", *rest) if len(shape) > 1 else ("v",)
    target = scores if call.shapes["target"] == shape else front
    rows = math.prod(shape) // shape[1 if len(shape) > 1 else 0]
    is_mean = not call.output and call.options.get("reduction", _MEAN) == _MEAN
    statistics = [
        (frozenset("v"), front, _FLOAT_BYTES * rows),
        (frozenset("v"), front, 2 * _FLOAT_BYTES * rows),
    ]
    if is_mean and target is front:
        statistics.append((frozenset(name for name in front if name), (), _FLOAT_BYTES))
    plain = target is front and "weight" not in call.shapes and not call.options.get("label_smoothing")
    summed = frozenset(name for name in front if name) if not call.output else frozenset[str]()
    output: Dims = front if call.output else ()
    inputs: dict[str, Dims] = {"self": scores, "target": target}
    parts = {} if plain else {"v": 1}
    return RuleResult(
        inputs, output, summed, frozenset(("self", "target")), parts=parts, statistics=tuple(statistics)
    )


def _score_of_target(call: OperatorCall) -> RuleResult:
    """As cross entropy, of logarithms that are whole for each sample."""
    form = _cross_entropy(call)
    return replace(form, parts={"v": 1}, statistics=form.statistics[2:])


def _loss_of_elements(call: OperatorCall) -> RuleResult:
    """Squared and absolute differences, summed where the result is one number."""
    dims = _labels(len(call.shapes["self"]))
    summed = frozenset[str]() if call.output else frozenset(dims)
    return RuleResult(
        dict.fromkeys(call.shapes, dims), dims if call.output else (), summed, frozenset(call.shapes)
    )


def _reduction(call: OperatorCall) -> RuleResult:
    """Sums and means over some dimensions: the parts of those are added up."""
    axes = _axes(call)
    dims = _labels(len(call.shapes["self"]))
    output = tuple(
        None if axis in axes else name
        for axis, name in enumerate(dims)
        if axis not in axes or call.options.get("keepdim")
    )
    return RuleResult({"self": dims}, output, frozenset(dims[axis] for axis in axes))


def _pool(space: int) -> Rule:
    """Images, which have so many dimensions, by all others: samples and channels."""

    def rule(call: OperatorCall) -> RuleResult:
        dims: Dims = (*_labels(len(call.output) - space), *(None,) * space)
        return RuleResult(dict.fromkeys(call.shapes, dims), dims, kept=frozenset(call.shapes))

    return rule


def _permuted(order: Callable[[OperatorCall], Sequence[int]]) -> Rule:
    def rule(call: OperatorCall) -> RuleResult:
        (shape,) = call.shapes.values()
        dims = _labels(len(shape))
        output = tuple(dims[axis] for axis in order(call))
        return RuleResult(dict.fromkeys(call.shapes, dims), output, is_cheap=True, moves=False)

    return rule


def _swapped(call: OperatorCall) -> list[int]:
    (shape,) = call.shapes.values()
    order = list(range(len(shape)))
    first, second = call.options.get("dim0", 0), call.options.get("dim1", len(shape) - 1)
    order[first], order[second] = order[second], order[first]
    return order


def _view(call: OperatorCall) -> RuleResult:
    """Elements keep their order: dimensions that are split or joined are divided by the outermost of them."""
    (name, before), *_ = call.shapes.items()
    source: list[str | None] = [None] * len(before)
    made: list[str | None] = [None] * len(call.output)
    parts: dict[str, int] = {}
    for ours, theirs in _pieces(before, call.output):
        outer = next((axis for axis in ours if before[axis] != 1), None)
        front = next((axis for axis in theirs if call.output[axis] != 1), None)
        if outer is not None and front is not None:
            label = f"i{front}"
            source[outer] = made[front] = label
            parts[label] = math.gcd(before[outer], call.output[front])
    return RuleResult({name: tuple(source)}, tuple(made), parts=parts, is_cheap=True, moves=False)


def _pieces(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dimensions of both shapes with as many elements."""
    found: list[tuple[list[int], list[int]]] = []
    first, second = 0, 0
    while first < len(before) or second < len(after):
        ours: list[int] = []
        theirs: list[int] = []
        left = right = 1
        while not (ours or theirs) or left != right:
            if (left <= right and first < len(before)) or second == len(after):
                left *= before[first]
                ours.append(first)
                first += 1
            else:
                right *= after[second]
                theirs.append(second)
                second += 1
        found.append((ours, theirs))
    return found


def _along(call: OperatorCall) -> RuleResult:
    """What takes a tensor apart, or puts some together, along one dimension, which stays whole."""
    first = max(call.shapes.values(), key=len)  # empty lists of numbers may stand among tensors
    if len(call.shapes) == 1 and first == call.output:  # all of it
        return _same(call)
    axis = call.options.get("dim", 0) % len(call.output if len(call.output) >= len(first) else first)
    dims: list[str | None] = [*_labels(len(first))]
    if len(call.output) == len(first):
        dims[axis] = None
        output = list(dims)
    elif len(call.output) < len(first):  # one entry taken
        dims[axis] = None
        output = dims[:axis] + dims[axis + 1 :]
    else:  # stacked
        output = [*dims[:axis], None, *dims[axis:]]
    alike = (name for name, shape in call.shapes.items() if len(shape) == len(first))
    return RuleResult(dict.fromkeys(alike, tuple(dims)), tuple(output))


def _whole_along(*, kept: str = "", option: str = "dim") -> Rule:
    """What looks at all entries along some dimensions, which the result may lack."""

    def rule(call: OperatorCall) -> RuleResult:
        dims = _labels(len(call.shapes["self"]))
        axes = _axes(call, option)
        read = tuple(None if axis in axes else name for axis, name in enumerate(dims))
        is_kept = len(call.output) == len(dims)
        output = tuple(name for name in read if is_kept or name is not None)
        return RuleResult({"self": read}, output, kept=frozenset((kept,)) - {""})

    return rule


def _axes(call: OperatorCall, option: str = "dim") -> set[int]:
    """The dimensions that an operator names; all where it names none."""
    count, given = len(call.shapes["self"]), call.options.get(option)
    over = range(count) if given is None or given == [] else [given] if isinstance(given, int) else given
    return {axis % count for axis in over}


def _at_indices(call: OperatorCall) -> RuleResult:
    """Entries taken from, or put to, places along one dimension.

    Where an index is shorter than the tensor along another dimension, it goes with the first entries there:
    equal parts of both do not belong together.
    """
    axis = call.options["dim"] % max(len(call.output), 1)
    sizes = zip(*call.shapes.values(), call.output, strict=True)
    dims = tuple(
        label if at != axis and len({*along}) == 1 else None
        for at, (label, along) in enumerate(zip(_labels(len(call.output)), sizes, strict=True))
    )
    return RuleResult(dict.fromkeys(call.shapes, dims), dims, kept=frozenset(("index",)))


def _padded(call: OperatorCall) -> RuleResult:
    """Whole along the dimensions that grow, shrink or shift."""
    (shape,) = call.shapes.values()
    some = [it for name, it in call.options.items() if name.startswith("pad.")]  # a list with computed sizes
    pads = call.options.get("pad", some)  # before and behind, of the last dimension first
    changed = {len(shape) - 1 - at // 2 for at, size in enumerate(pads) if size != 0}
    dims = tuple(None if at in changed else label for at, label in enumerate(_labels(len(shape))))
    return RuleResult(dict.fromkeys(call.shapes, dims), dims)


def _expand(call: OperatorCall) -> RuleResult:
    return RuleResult(_pointwise(call).inputs, _labels(len(call.output)), is_cheap=True, moves=False)


def _same(call: OperatorCall) -> RuleResult:
    (shape,) = call.shapes.values()
    dims = _labels(len(shape))
    return RuleResult(dict.fromkeys(call.shapes, dims), dims, is_cheap=True, moves=False)


_LINEAR = frozenset(
    ("add", "sub", "neg", "rsub", "clone", "masked_fill", "_to_copy", "to", "copy", "contiguous")
)
"""Element by element, with gradients that need no values."""

PRODUCTS = frozenset(
    (
        "linear",
        *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mul"),
        *("conv1d", "conv2d", "conv3d", "convolution"),
    )
)
"""Of which each factor is kept for the gradients of the others."""

RULES: Mapping[str, Rule] = {
    "linear": _linear,
    "matmul": _product("self", "other"),
    "mm": _product("self", "mat2"),
    "bmm": _product("self", "mat2"),
    "addmm": _product("mat1", "mat2", "self"),
    "baddbmm": _product("batch1", "batch2", "self"),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution"), _convolution),
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    "layer_norm": _norm_over_last,
    "rms_norm": _norm_over_last,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), _softmax),
    "cross_entropy_loss": _cross_entropy,
    **dict.fromkeys(("nll_loss", "nll_loss_nd"), _score_of_target),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss"), _loss_of_elements),
    **dict.fromkeys(("sum", "mean"), _reduction),
    **dict.fromkeys(("max_pool1d", "avg_pool1d", "adaptive_avg_pool1d"), _pool(1)),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d"), _pool(2)),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _pool(2)),
    **dict.fromkeys(("max_pool3d", "avg_pool3d", "adaptive_avg_pool3d"), _pool(3)),
    "transpose": _permuted(_swapped),
    "t": _permuted(_swapped),
    "numpy_T": _permuted(lambda call: range(len(call.output))[::-1]),
    "permute": _permuted(lambda call: call.options["dims"]),
    **dict.fromkeys(
        ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze"), _view
    ),
    **dict.fromkeys(
        ("cat", "stack", "split", "split_with_sizes", "chunk", "slice", "select", "unbind"), _along
    ),
    **dict.fromkeys(("expand", "expand_as", "broadcast_tensors"), _expand),
    **dict.fromkeys(("cumsum", "argmax", "argmin", "any", "all"), _whole_along()),
    **dict.fromkeys(("sort", "argsort", "topk", "amax", "amin", "max", "min"), _whole_along(kept="output")),
    **dict.fromkeys(("var", "std", "logsumexp", "linalg_vector_norm", "prod"), _whole_along(kept="self")),
    **dict.fromkeys(("flip", "roll"), _whole_along(option="dims")),
    **dict.fromkeys(("gather", "scatter", "scatter_add"), _at_indices),
    **dict.fromkeys(("pad", "constant_pad_nd"), _padded),
    "einsum": _einsum,
    "where": _keeping("condition"),
    "type_as": lambda call: _pointwise(replace(call, shapes={"self": call.shapes["self"]})),
    **dict.fromkeys(("detach", "alias", "getitem"), _same),
    **dict.fromkeys(
        ("dropout", "contiguous", "clone", "to", "_to_copy", "zeros_like", "empty_like"),
        _keeping(),
    ),
    **dict.fromkeys(("__and__", "__or__"), _keeping()),
    **dict.fromkeys(("relu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt"), _keeping("output")),
}
"""By torch's name of the operator."""
