"""The process groups of a trainer: all ranks by gloo, each worker's replicas by the chosen collectives.

Where links have addresses gloo could not connect all ranks, and schedules serve them, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from arborcast import topologies
from arborcast.backends.group.process_group import SynthGroup
from arborcast.backends.options import Options
from arborcast.backends.schedules.group_fabric import has_cables
from arborcast.backends.tensors.torch_compat import break_gloo, forget_meshes
from arborcast.pipeline.errors import PlanError
from arborcast.pipeline.run.devices import HOST, backend_of
from arborcast.pipeline.run.failures import TrainingError, words_of
from arborcast.pipeline.run.prepared_layers import AXES
from arborcast.pipeline.stages import Plan
from arborcast.synth.errors import InputError
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COLLECTIVES = ("synth", "gloo")
"""What sums gradients over replicas: synthesized schedules, or gloo's own; on devices their own, too."""


class Groups:
    """All process groups of a trainer; every rank of the job makes them.

    Args:
        plan: whose stages they are for; None where all are made by `make`.
        collectives: one of `COLLECTIVES`, or torch's own backend for the device.
        fabric: of the job; None for what the environment says, or a full mesh.
        timeout_s: after which a call without progress fails.
        start_timeout_s: likewise where ranks may differ by more: at the start, and while files are read and
            written.
        tensor_ranks: how many ranks share each replica of a stage; None where none are made a mesh.
        device: that passes run on.

    Attributes:
        job: all ranks, gloo or along cables; also carries the messages between stages in host memory.
        ways: all ranks, for messages between devices: from lower ranks to higher ones, and back.
        stage: this rank's place in all replicas of its stages; None without others, or without work.
        mesh: of all ranks of its stages; None without.
    """

    def __init__(
        self,
        plan: Plan | None,
        collectives: str,
        fabric: Topology | None,
        timeout_s: float,
        start_timeout_s: float,
        tensor_ranks: int | None = None,
        device: torch.device = HOST,
    ) -> None:
        own = [] if device == HOST else [backend_of(device)]
        known = [*(it for it in COLLECTIVES if it != "synth" or device.type in ("cpu", "cuda")), *own]
        if collectives not in known:
            raise InputError(f"collectives: must be one of {', '.join(known)}, got {collectives}")
        self._timeout, self._start_timeout = timedelta(seconds=timeout_s), timedelta(seconds=start_timeout_s)
        self._backend = collectives
        self._options = _options(fabric, device) if collectives == "synth" else None
        self._made: list[dist.ProcessGroup] = []
        rank, is_cabled = dist.get_rank(), has_cables(_options(fabric, HOST) or _known())
        if is_cabled and collectives != "synth":
            raise InputError(f"collectives: must be synth where links have addresses, got {collectives}")
        everybody = range(dist.get_world_size())
        job = self.make(everybody, "synth" if is_cabled else "gloo")
        assert job is not None
        self.job = job
        self.ways: tuple[dist.ProcessGroup, ...] = ()
        if device != HOST:
            made = (
                self._keep(dist.new_group(backend=backend_of(device), timeout=self._timeout)) for _ in "ab"
            )
            self.ways = tuple(it for it in made if it is not None)
        self.stage: dist.ProcessGroup | None = None
        self.mesh: DeviceMesh | None = None
        for worker in plan.workers if plan is not None else ():
            ranks, width = worker.ranks, tensor_ranks or 1
            is_mesh = tensor_ranks is not None
            columns = [ranks[place::width] for place in range(width)]
            rows = [ranks[at : at + width] for at in range(0, len(ranks), width)]
            data = [self.make(it) if is_mesh or len(it) > 1 else None for it in columns]
            along = [self.make(it) if is_mesh else None for it in rows]
            if rank in ranks:
                row, place = divmod(ranks.index(rank), width)
                self.stage = data[place] if len(rows) > 1 else None
                groups = [it for it in (data[place], along[row]) if it is not None]
                self.mesh = device_mesh(groups, torch.tensor(rows), AXES, device) if is_mesh else None

    def make(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """Another group with the same collectives; None on ranks outside. Every rank of the job calls it.

        Args:
            ranks: of it.
            backend: of torch; that of the collectives where None.
        """
        backend = backend or self._backend
        if backend == "synth":
            import arborcast.torch_backend  # noqa: F401 (makes the backend known)
        options = self._options if backend == "synth" else None
        made = dist.new_group(sorted(ranks), timeout=self._timeout, backend=backend, pg_options=options)
        return self._keep(made)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Let calls of all ranks wait as long as at the start."""
        self.job.set_timeout(self._start_timeout)
        try:
            yield
        finally:
            self.job.set_timeout(self._timeout)

    def meet(self) -> None:
        """Wait until all ranks are here, as long as at the start.

        Raises:
            TrainingError: some rank did not come, or is gone.
        """
        try:
            with self.patient():
                self.job.barrier().wait()
        except RuntimeError as error:
            raise TrainingError(
                f"rank {dist.get_rank()}: waiting for all ranks to start: {words_of(error)}"
            ) from error

    def break_all(self) -> None:
        """End all calls in flight, here and on ranks that wait for this one."""
        for group in self._made:
            with contextlib.suppress(RuntimeError):
                if isinstance(group, SynthGroup) or group in self.ways:
                    group.abort()
                else:
                    break_gloo(group._get_backend(HOST))

    def close(self) -> None:
        """End all connections."""
        for group in reversed(self._made):
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # the job may have ended
                dist.destroy_process_group(group)
        self._made.clear()

    def _keep(self, group: object) -> dist.ProcessGroup | None:
        if not isinstance(group, dist.ProcessGroup):  # torch's mark for ranks outside
            return None
        self._made.append(group)
        return group


def device_mesh(
    groups: list[dist.ProcessGroup],
    ranks: torch.Tensor,
    names: tuple[str, ...],
    device: torch.device = HOST,
) -> DeviceMesh:
    """A mesh as torch has it, of groups that there are along each of its axes."""
    from torch.distributed.device_mesh import DeviceMesh

    forget_meshes()  # those of an earlier trainer
    return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=names)


def fabric_of(plan: Plan, topology: Topology | str | None, size: int) -> Topology | None:
    """The fabric of a job by a plan, by the caller, or None for what the environment says.

    Raises:
        PlanError: the plan is for another one, or it has fewer ranks than the job.
    """
    given = topologies.load(topology) if isinstance(topology, str) else topology
    said = "topology"
    if given is None:
        options = Options.from_environment(os.environ)
        if isinstance(options.topology, str) and options.ranks is None:
            given, said = topologies.load(options.topology), "ARBORCAST_TOPOLOGY"
    if plan.topology is not None and given is not None and not _is_same(plan.topology, given):
        raise PlanError(f"plan: must be for {said} {given.name}, got one for {plan.topology.name}")
    found = given if plan.topology is None else plan.topology
    if found is not None and found.ranks < size:
        raise PlanError(
            f"topology {found.name}: must have a rank for each of the {size} of the job, got {found.ranks}"
        )
    return found


def _options(fabric: Topology | None, device: torch.device) -> Options | None:
    """What a synthesized group is told; None leaves it to the default group's options or the environment."""
    known = _known()
    if device != HOST:
        known = replace(known, p2p=device.type)
    if fabric is None:
        return None if device == HOST else known
    ranks = tuple(range(dist.get_world_size()))
    return replace(known, topology=fabric, ranks=ranks)


def _known() -> Options:
    """What the default group was told; the environment may say more."""
    world = dist.group.WORLD
    return world.options if isinstance(world, SynthGroup) else Options()


def _is_same(one: Topology, other: Topology) -> bool:
    """Whether two values are one fabric, whatever their names."""
    return (one.ranks, one.links, len(one.switches)) == (other.ranks, other.links, len(other.switches))
