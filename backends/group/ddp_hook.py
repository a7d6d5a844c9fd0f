"""Scheduled allreduces for who cannot change the backend: a hook for DDP's gradients, and a plain call.

    allreduces = ScheduledAllreduce()                      # over the default group, whatever its backend is
    model.register_comm_hook(allreduces, allreduce_hook)   # model: DistributedDataParallel
    allreduces.allreduce(tensor)

Who can change it writes `init_process_group("synth")` instead and needs none of this.
"""

# Annotations are evaluated here: DDP refuses a hook whose bucket is annotated by a string.

import logging

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from arborcast.backends.errors import ExecutionError
from arborcast.backends.group.communicator import Communicator
from arborcast.backends.group.work_queue import WorkQueue
from arborcast.backends.options import Options
from arborcast.backends.tensors.checks import check_tensor
from arborcast.backends.tensors.torch_compat import PrefixStore
from arborcast.backends.tensors.torch_reduction import name_of, operator_of
from arborcast.synth.collective import Kind
from arborcast.synth.errors import InputError

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class ScheduledAllreduce:
    """Allreduces of a group's CPU tensors by schedules, beside what the group itself does.

    All ranks of the group make it together, and then make the same calls in the same order. A thread of its
    own serves them one after another, so that a bucket of gradients travels while the next is computed.

    Args:
        group: whose ranks take part; its backend is used only to begin. The default group where None.
        options: the fabric and its limits; where None, what the environment says.
        timeout_s: after how many seconds without progress a call fails; the default is torch's.

    Raises:
        InputError: there is no group, or the options do not fit or differ between ranks.
        ExecutionError: a rank did not come in time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        options: Options | None = None,
        *,
        timeout_s: float = 1800.0,
    ) -> None:
        group = group or dist.group.WORLD
        if group is None:
            raise InputError("scheduled allreduces: no process group given and no default group initialised")
        self.size = group.size()
        store = group.get_group_store()
        self._communicator = Communicator(
            PrefixStore(f"allreduces/{_next_number(group)}", store),
            group.rank(),
            self.size,
            options=options,
            global_ranks=dist.get_process_group_ranks(group),
            world_size=dist.get_world_size(),
            timeout_s=timeout_s,
        )
        fabric = self._communicator.fabric
        if group.rank() == 0 and self.size > 1:
            level = logging.WARNING if fabric.is_assumed else logging.INFO
            log.log(level, "scheduled allreduces: fabric %s", fabric)
        self._communicator.prepare(Kind.ALLREDUCE)
        self._queue = WorkQueue("allreduces")

    def allreduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Combine the tensors of all ranks, in place, after the calls that are in flight.

        Args:
            tensor: on the CPU, contiguous, of a real type.
            op: any that `backends.tensors.torch_reduction.operator_of` serves.

        Raises:
            InputError: the tensor or the operation cannot be served.
            ExecutionError: a peer died, did not come in time, or called something else.
        """
        flat = _checked(tensor, op)
        self._queue.submit(lambda: self._communicator.allreduce(flat, op)).wait()

    def average(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """Replace the tensor by the mean over all ranks; the future holds it when that is done.

        It is divided before it is summed, as DDP does, so that sums of float16 do not overflow.

        Raises:
            InputError: as for `allreduce`; what else goes wrong is in the future.
        """
        flat = _checked(tensor, dist.ReduceOp.SUM)

        def run() -> Tensor:
            flat.div_(self.size)
            self._communicator.allreduce(flat, dist.ReduceOp.SUM)
            return tensor

        return self._queue.submit(run).get_future()

    def explain(self, nbytes: int) -> str:
        """What serves a tensor of that size, in one line."""
        return self._communicator.explain(nbytes)

    def counters(self) -> dict[str, int]:
        """How many calls went by a schedule, and how many by gloo."""
        return self._communicator.counters().get(str(Kind.ALLREDUCE), {"schedule": 0, "gloo": 0})

    def close(self, *, wait_s: float = 5.0) -> None:
        """Finish the calls in flight, for `wait_s` seconds at most, and end the connections.

        Raises:
            ExecutionError: calls were still in flight; they have failed on all ranks.
        """
        if self._queue.close("the scheduled allreduces were closed", wait_s=wait_s):
            self._communicator.close()
            return
        reason = "scheduled allreduces closed with calls in flight"
        self._communicator.abort(reason)
        raise ExecutionError(reason)


def allreduce_hook(state: ScheduledAllreduce, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """For `DistributedDataParallel.register_comm_hook(state, allreduce_hook)`: the mean over all ranks.

    Args:
        state: made over the group that the model was wrapped with.
        bucket: DDP's.
    """
    return state.average(bucket.buffer())


def _next_number(group: dist.ProcessGroup) -> int:
    """How many were made over this group before: each rank counts its own, which are as many everywhere.

    The store counts, not the group: a group of NCCL alone has no way for a number on the CPU.
    """
    return group.get_group_store().add(f"allreduces/{group.rank()}", 1)


def _checked(tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    flat = check_tensor("the tensor", tensor, tensor.numel(), tensor.dtype, _CPU)
    assert flat is not None
    if operator_of(op, tensor.dtype) is None:
        raise InputError(f"reduction {name_of(op)}: schedules do not serve it on elements of {tensor.dtype}")
    return flat
