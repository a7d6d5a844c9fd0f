"""Before each batch: all ranks come to know what it looks like, whoever was given it, and make ready for it.

Where only some ranks are given data, all hear its shapes in one small allreduce. Shapes have numbers, the
same on all ranks: these met for each (`ConfigBarrier`). Every rank says the number of its inputs, the samples
of its targets, both, or nothing; where that does not go together, or a shape is new, all meet again, in
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.run.assignment import RankAssignment
from arborcast.pipeline.run.batches import Batch, Signature, Tensors, as_tuple, said_of, told, words_of
from arborcast.pipeline.run.failures import ConfigBarrier, FailureBroadcast
from arborcast.pipeline.run.local_model import LocalModel, frozen_of
from arborcast.pipeline.run.stage_groups import Groups

GRACE_S = 5.0
"""How long one that refuses a batch waits for others to refuse theirs, before it ends the training."""

MEET = -1
"""Instead of a number of samples: all ranks are to meet."""

_MOST = 1 << 40
"""Above all numbers that are said."""


class BatchNegotiation:
    """What ranks tell each other of batches.

    Args:
        place: of this rank.
        returns_loss: whether the model returns its loss, and so takes targets with its inputs.
        agreement: in words.
        faults: of the trainer.
        groups: of the job.
        timeout_s: of the trainer.

    Attributes:
        grace_s: how long a rank that refuses a batch waits for others to refuse theirs.
    """

    def __init__(
        self,
        place: RankAssignment,
        returns_loss: bool,
        agreement: ConfigBarrier,
        faults: FailureBroadcast,
        groups: Groups,
        timeout_s: float,
    ) -> None:
        self.grace_s, self._has_met = min(GRACE_S, timeout_s), False
        self._place, self._returns_loss = place, returns_loss
        self._agreement, self._faults, self._groups = agreement, faults, groups
        self._hearing = _Hearing(groups.job)

    def batch(
        self, call: int, local: LocalModel, inputs: Tensors | None, targets: Tensors | None, *, training: bool
    ) -> tuple[Batch, Signature]:
        """The next one as this rank needs it, and its shape, for which all ranks are ready.

        Args:
            call: number of the step.
            local: what this rank trains.
            inputs: see `Trainer.step`.
            targets: likewise.
            training: whether it is to be trained with.

        Raises:
            BatchError: see `Trainer.step`.
            TrainingError: some rank did not come.
        """
        executor, model = local.executor, local.whole
        frozen = frozen_of(local.parameters) if training else ""
        changed = training and frozen != local.frozen
        said, batch, samples = Signature(None, None, training, frozen), None, None
        refusal: BatchError | None = None
        try:
            batch, targets = self._given(local, inputs, targets)
            if batch is not None:
                said, samples = batch.signature(training, frozen), batch.samples
            elif targets is not None:
                samples, shapes = _samples_and_words(targets)
                said = replace(said, targets=shapes)
        except BatchError as error:
            refusal = error
        signature = said if refusal is None else None
        if self._hearing.is_needed:
            mine = None if said.inputs is None else replace(said, targets=None)
            if refusal is not None or changed:
                samples = MEET
            with self._faults.all_or_nothing(lambda: "hearing of the batch", call):
                signature = self._hearing.hear(mine, samples, training=training)
        if signature is None or changed or not executor.knows(signature):
            with self._faults.all_or_nothing(lambda: executor.doing, call, forgives=True):
                # Unless all ranks refuse it, those that do not would go on with the next batch of this one;
                # those that were given one of a known shape do not come here.
                words = str(said) if refusal is None else f"what is refused: {refusal}"
                wait_s = self.grace_s if refusal is not None and self._has_met else None
                heard = self._agreement.agree(f"call {call}", words, timeout_s=wait_s)
                if refusal is not None:
                    raise refusal
                signature = self._agreed(model, heard, said)
                if changed:
                    local.update.check_complete("parameters must be frozen or unfrozen")
            self._has_met = True
        if batch is None:
            assert signature.inputs is not None, "somebody was given some"
            batch = Batch.of(told(signature.inputs), targets, model.sample_dims(0), self._place.column)
        with self._faults.all_or_nothing(lambda: executor.doing, call):
            if changed:
                executor.follow({name: it.requires_grad for name, it in local.parameters.items()})
                local.update.retrain()
                self._groups.meet()
                local.frozen = frozen
            executor.prepare(batch, signature)
        return batch, signature

    def _given(
        self, local: LocalModel, inputs: Tensors | None, targets: Tensors | None
    ) -> tuple[Batch | None, Tensors | None]:
        """What a rank was given, checked: None without inputs, and its targets.

        Raises:
            BatchError: it is not what the model takes, or something is missing.
        """
        model = local.whole
        needs_inputs, needs_targets = self._place.needs(self._returns_loss)
        for name, value, needed in (
            ("inputs", inputs, needs_inputs or self._hearing.is_needed is False),
            ("targets", inputs if targets is None else targets, needs_targets),
        ):
            if value is None and needed:
                why = "" if name == "targets" or needs_inputs else " as in the first batch"
                raise BatchError(f"batch: {self._place.name} must be given the {name}{why}, got none")
        for name, parameter in local.module.named_parameters() if local.trained else ():
            if parameter.requires_grad != local.trained[name]:
                raise BatchError(
                    "batch: parameters must stay frozen or trained as they were when they were divided, got "
                    f"a change of {name}"
                )
        if inputs is None:
            return None, targets
        dims = model.sample_dims(0)
        if self._returns_loss:
            given = model.tensors_of(inputs, targets)  # type: ignore[attr-defined]
            targets = tuple(given[index] for index in model.labels)  # type: ignore[attr-defined]
        else:
            given = model.tensors_of(inputs) if hasattr(model, "tensors_of") else inputs
            if targets is None and needs_targets:
                targets = inputs
        batch = Batch.of(given, targets, dims, self._place.column)
        return batch, batch.targets

    def _agreed(self, model: Layered, heard: Sequence[str], said: Signature) -> Signature:
        """The shape that all ranks were given, or heard of, in words.

        Raises:
            BatchError: nobody was given inputs, or inputs and targets count other samples; on all ranks.
        """
        inputs, targets = said_of("inputs", heard), said_of("targets", heard)
        if inputs is None:
            raise BatchError("batch: some rank must be given the inputs, got none on any")
        Batch.of(
            told(inputs), None if targets is None else told(targets), model.sample_dims(0), self._place.column
        )
        is_needed = any(said_of("inputs", [words]) is None for words in heard)
        self._hearing.is_needed = is_needed or self._hearing.is_needed or False
        if not self._hearing.is_needed:
            return said
        signature = Signature(inputs, None, said.training, said.frozen)
        self._hearing.know(signature)
        return signature


def _samples_and_words(targets: Tensors) -> tuple[int, tuple[str, ...]]:
    tensors = as_tuple("targets", targets)
    counts = {it.shape[0] for it in tensors if it.dim()}
    if len(counts) > 1:
        raise BatchError(f"targets: must have as many samples each, got {sorted(counts)}")
    return tensors[0].shape[0] if tensors[0].dim() else MEET, words_of(tensors)  # all refuse one without


class _Hearing:
    """The shapes that ranks of a job know together.

    Args:
        group: of all ranks of the job.

    Attributes:
        is_needed: whether some rank was given no inputs, so that ranks hear of each batch; None before any.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._numbers: dict[Signature, int] = {}
        self.is_needed: bool | None = None

    def know(self, signature: Signature) -> None:
        """A shape that all ranks have met with."""
        self._numbers.setdefault(signature, len(self._numbers))

    def hear(self, mine: Signature | None, samples: int | None, *, training: bool) -> Signature | None:
        """The shape of the next batch; None where ranks must meet. Every rank calls it.

        Args:
            mine: of the inputs that this rank was given; None without any.
            samples: of what this rank was given; None of nothing, or `MEET`.
            training: whether the batch is to be trained with.
        """
        number = None if mine is None else self._numbers.get(mine, -1)
        said = (number, samples, int(training))
        # The largest and the smallest of each in one maximum; 0 where nothing is said.
        both = [[0, 0] if it is None else [it + 2, _MOST - it] for it in said]
        heard = torch.tensor(both, dtype=torch.int64)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._group)
        if any(most - 2 != _MOST - least or most < 2 for most, least in heard.tolist()):
            return None
        return list(self._numbers)[int(heard[0, 0]) - 2]
