"""What the parts of a trainer share on a rank: its place, the options, groups and links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from arborcast.pipeline.run import checkpoints
from arborcast.pipeline.run.assignment import RankAssignment
from arborcast.pipeline.run.failures import FailureBroadcast
from arborcast.pipeline.run.precision import Precision
from arborcast.pipeline.run.recorder import PassRecorder
from arborcast.pipeline.run.stage_groups import Groups
from arborcast.pipeline.run.stage_messages import Messenger
from arborcast.pipeline.run.training_options import TrainingOptions


@dataclass(frozen=True, eq=False)
class RankContext:
    """Of one rank.

    Attributes:
        place: of the rank in the plan.
        options: of the training.
        groups: of the job.
        faults: tells the others what this rank fails at.
        links: to other stages.
        precision: of passes and losses, and the scale of these.
        recorder: notes what is done when.
        device: that passes run on.
    """

    place: RankAssignment
    options: TrainingOptions
    groups: Groups
    faults: FailureBroadcast
    links: Messenger
    precision: Precision
    recorder: PassRecorder
    device: torch.device

    def together(self, doing: str, call: Callable[[], checkpoints.Result]) -> checkpoints.Result:
        """What a call gives, once no rank has raised in it; every rank comes here, and may go on after.

        Raises:
            InputError: of the first rank that raised one; on all ranks.
            TrainingError: a rank is gone, or raised something else.
        """
        with self.faults.all_or_nothing(lambda: doing, forgives=True), self.groups.patient():
            return checkpoints.together(self.groups.job, call)
