"""Before each batch: all ranks come to know what it looks like, whoever was given it, and make ready for it.

Each says in words what it was given: inputs, targets, both, or nothing. Where all are given the inputs they
meet (`ConfigBarrier`) for new shapes alone, and say nothing of those that they know; where some are not, all
say of each batch whether it is as the one before, by a sum of three numbers, and what it is where it is not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from arborcast.pipeline.errors import BatchError
from arborcast.pipeline.model.layered import Layered
from arborcast.pipeline.run.batches import Batch, Signature, Tensors, as_tuple, said_of, told, words_of
from arborcast.pipeline.run.failures import ConfigBarrier, check_alike
from arborcast.pipeline.run.local_model import LocalModel, frozen_of
from arborcast.pipeline.run.rank_context import RankContext

GRACE_S = 5.0
"""How long one that refuses a batch waits for others to refuse theirs, before it ends the training."""


class BatchNegotiation:
    """What ranks tell each other of batches.

    Args:
        context: of this rank.
        agreement: in words.
        timeout_s: of the trainer.

    Attributes:
        grace_s: how long a rank that refuses a batch waits for others to refuse theirs.
    """

    def __init__(self, context: RankContext, agreement: ConfigBarrier, timeout_s: float) -> None:
        self.grace_s, self._has_met = min(GRACE_S, timeout_s), False
        self._place, self._faults, self._groups = context.place, context.faults, context.groups
        self._returns_loss = (
            context.options.loss_fn is None
        )  # so that the model takes targets with its inputs
        self._agreement = agreement
        self._is_heard: bool | None = None  # whether all say what each batch is; None before any
        self._before: dict[bool, tuple[str, Signature]] = {}  # by training: own words, and what was agreed

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
        said, batch = Signature(None, None, training, frozen), None
        refusal: BatchError | None = None
        try:
            batch, targets = self._given(local, inputs, targets)
            if batch is not None:
                said = batch.signature(training, frozen)
            elif targets is not None:
                said = replace(said, targets=words_of(as_tuple("targets", targets)))
        except BatchError as error:
            refusal = error
        signature = said
        if self._is_heard or refusal is not None or changed or not executor.knows(said):
            with self._faults.all_or_nothing(
                lambda: "hearing of the batch" if self._is_heard else executor.doing, call, forgives=True
            ):
                signature = self._as_before(said, refusal) or self._agreed(model, call, said, refusal)
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
            ("inputs", inputs, needs_inputs or self._is_heard is False),
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

    def _heard(self, call: int, said: Signature, refusal: BatchError | None) -> list[str]:
        """What each rank says of the batch, in words that go together.

        Raises:
            BatchError: they do not; on all ranks.
        """
        words = str(said) if refusal is None else f"what is refused: {refusal}"
        if self._is_heard:
            heard = [""] * dist.get_world_size(self._groups.job)
            dist.all_gather_object(heard, words, group=self._groups.job)
            check_alike("batch", heard)
            return heard
        # Unless all ranks refuse it, those that do not would go on with the next batch of this one; those
        # that were given one of a known shape do not come here.
        wait_s = self.grace_s if refusal is not None and self._has_met else None
        return self._agreement.agree(f"call {call}", words, timeout_s=wait_s)

    def _agreed(self, model: Layered, call: int, said: Signature, refusal: BatchError | None) -> Signature:
        """The shape that all ranks were given, or heard of, in words.

        Raises:
            BatchError: this rank refuses the batch, words do not go together, nobody was given inputs, or
                inputs and targets count other samples; the last three on all ranks.
        """
        heard = self._heard(call, said, refusal)
        if refusal is not None:
            raise refusal
        inputs, targets = said_of("inputs", heard), said_of("targets", heard)
        if inputs is None:
            raise BatchError("batch: some rank must be given the inputs, got none on any")
        Batch.of(
            told(inputs), None if targets is None else told(targets), model.sample_dims(0), self._place.column
        )
        lacks = any(said_of("inputs", [words]) is None for words in heard)
        self._is_heard = lacks or self._is_heard or False
        if not self._is_heard:
            return said
        signature = Signature(inputs, None, said.training, said.frozen)
        self._before[said.training] = str(said), signature
        return signature

    def _as_before(self, said: Signature, refusal: BatchError | None) -> Signature | None:
        """The shape, where each rank says of this batch what it said of the last one; None elsewhere."""
        if not self._is_heard:
            return None
        words, signature = self._before.get(said.training, ("", None))
        is_new = refusal is not None or words != str(said)
        heard = torch.tensor([is_new, said.training, not said.training], dtype=torch.int32)
        dist.all_reduce(heard, op=dist.ReduceOp.MAX, group=self._groups.job)
        anything_new, some_train, some_evaluate = heard.tolist()
        return None if anything_new or (some_train and some_evaluate) else signature
