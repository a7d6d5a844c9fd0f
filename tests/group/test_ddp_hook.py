"""Torch's own hook over a group "synth" beside DDP's: for jobs whose default group must stay what it is."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.support.framework_checks import small_model, train
from tests.support.ranks import run_ranks

RANKS_IMPORT = ("torch._dynamo",)

BUCKET_MB = 0.002  # five buckets for the small model


def _train_both_ways(rank: int, size: int) -> tuple[float, dict[str, int]]:
    """The largest difference to DDP over gloo in losses and parameters, and who served the calls."""
    import arborcast.torch_backend  # noqa: F401

    plain, hooked = (
        DistributedDataParallel(small_model(), bucket_cap_mb=BUCKET_MB) for _ in ("plain", "hooked")
    )
    group = dist.new_group(backend="synth")
    hooked.register_comm_hook(group, default_hooks.allreduce_hook)
    assert dist.get_backend() == "gloo"
    pairs = zip(train(rank, plain), train(rank, hooked), strict=True)
    difference = max((ours - theirs).abs().max().item() for theirs, ours in pairs)
    return difference, group.counters()["allreduce"]


def test_gradients_go_by_schedules_though_the_default_group_is_gloo() -> None:
    environ = {"ARBORCAST_TOPOLOGY": "full:2"}
    for difference, counters in run_ranks(2, _train_both_ways, environ=environ):
        assert difference <= 1e-6
        assert counters["schedule"] > 3 * 2  # three steps with several buckets each
        assert counters["gloo"] == 0
