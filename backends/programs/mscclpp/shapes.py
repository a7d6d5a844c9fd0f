"""The form of MSCCL++'s execution plans: which keys there are and what each takes, checked by pydantic.

Of keys that nobody knows the runtime takes no notice; `reader` names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, NotRequired, TypeAlias

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic refuses typing's own before Python 3.12

MAX_CELLS = 1 << 22
MAX_OPERATIONS = 1 << 18
MAX_NUMBER = (1 << 31) - 1
MAX_LIST = 4096

_LOOSE = with_config(ConfigDict(extra="allow", strict=True))

Chunks: TypeAlias = Annotated[int, Field(ge=0, le=MAX_CELLS)]
Number: TypeAlias = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Positive: TypeAlias = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Bytes: TypeAlias = Annotated[int, Field(ge=0, le=1 << 64)]
Numbers: TypeAlias = Annotated[list[Number], Field(max_length=MAX_LIST)]
MemoryName: TypeAlias = Literal["i", "o", "s"]
ChannelType: TypeAlias = Literal["memory", "port", "switch"]


class MoveForm(NamedTuple):
    """What an operation that moves data reads and writes.

    Its ends are `own` memory, that of others (`far`), or of all ranks of a switch (`group`), each with or
    without packets; packets of its own are read from scratch.

    Attributes:
        first: where its first source is.
        others: where all further ones are; empty where there are none.
        own: where targets of the rank itself are.
        sent: where all further targets are; empty where there are none.
    """

    first: str
    others: str = ""
    own: tuple[str, ...] = ()
    sent: str = ""


FORMS = {
    "put": MoveForm("own", sent="far"),
    "pws": MoveForm("own", sent="far"),
    "pwsf": MoveForm("own", sent="far"),
    "ppkt": MoveForm("own", sent="far packets"),
    "rppkt": MoveForm("own packets", sent="far packets"),
    "copy": MoveForm("own", own=("own",)),
    "cpkt": MoveForm("own", own=("own packets",)),
    "upkt": MoveForm("own packets", own=("own",)),
    "get": MoveForm("far", own=("own",)),
    "glres": MoveForm("group", own=("group",)),
    "gstore": MoveForm("own", own=("group",)),
    "gstorepkt": MoveForm("any packets", own=("group packets",)),
    "re": MoveForm("own", "own", ("own",)),
    "res": MoveForm("own", "own", ("own",), "far"),
    "rre": MoveForm("own", "far", ("own",)),
    "rres": MoveForm("own", "far", ("own",), "far"),
    "repkt": MoveForm("own", "own packets", ("own",)),
    "respkt": MoveForm("own", "own packets", ("own",), "far packets"),
    "recpkt": MoveForm("own", "own packets", ("own", "own packets")),
    "recspkt": MoveForm("own", "own packets", ("own", "own packets"), "far packets"),
}
"""Of each operation that moves data. Of two alike, the first one does no more than that."""

OperationName: TypeAlias = Literal[
    "nop", "barrier", "flush", "sem_acquire", "sem_release", "signal", "rlxsignal", "wait", "rlxwait",
    "put", "pws", "pwsf", "ppkt", "rppkt", "copy", "cpkt", "upkt", "get", "glres", "gstore", "gstorepkt",
    "re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt",
]  # fmt: skip


@_LOOSE
class BufferShape(TypedDict):
    """A span: of the rank itself (`type`), of another one, or of all ranks of a switch channel."""

    index: Chunks
    size: Chunks
    type: NotRequired[MemoryName]
    buffer_id: NotRequired[Number]
    switch_channel_id: NotRequired[Number]


@_LOOSE
class GroupInfoShape(TypedDict):
    """Which of the blocks that share an operation this one is."""

    tb_id: Number
    tbg_size: Annotated[int, Field(ge=1, le=MAX_LIST)]


@_LOOSE
class IterationShape(TypedDict):
    """What an iteration of a pipeline handles."""

    num_chunks: Annotated[int, Field(ge=1, le=MAX_CELLS)]
    unit_size: Positive


_Buffers: TypeAlias = Annotated[list[BufferShape], Field(max_length=256)]
_Few: TypeAlias = Annotated[list[Number], Field(max_length=256)]


@_LOOSE
class OperationShape(TypedDict):
    """An operation; which keys it needs depends on its name."""

    name: OperationName
    channel_type: NotRequired[Literal["memory", "port", "switch", "none"]]
    channel_ids: NotRequired[_Few]
    src_buff: NotRequired[_Buffers]
    dst_buff: NotRequired[_Buffers]
    barrier_id: NotRequired[Number]
    num_threadblocks: NotRequired[Positive]
    semaphore_ids: NotRequired[_Few]
    tbg_info: NotRequired[GroupInfoShape]
    reduce_op: NotRequired[Any]


@_LOOSE
class PipelineShape(TypedDict):
    """Operations that are gone through several times, each time for another part of their chunks."""

    name: Literal["pipeline"]
    iter_context: IterationShape
    ops: Annotated[list[OperationShape], Field(max_length=MAX_OPERATIONS)]


@_LOOSE
class ListedShape(TypedDict):
    """Channels of one kind, by their numbers in the list of the rank."""

    channel_type: ChannelType
    channel_ids: Numbers


@_LOOSE
class ReferencesShape(TypedDict):
    """Remote buffers, by their numbers in the list of the rank."""

    access_channel_type: str
    remote_buffer_ids: Numbers


@_LOOSE
class BlockShape(TypedDict):
    """A thread block."""

    id: Number
    ops: Annotated[list[OperationShape | PipelineShape], Field(max_length=MAX_OPERATIONS)]
    channels: Annotated[list[ListedShape], Field(max_length=MAX_LIST)]
    remote_buffer_refs: NotRequired[Annotated[list[ReferencesShape], Field(max_length=MAX_LIST)]]


@_LOOSE
class RankGroupShape(TypedDict):
    """Ranks whose memory a switch reaches."""

    ranks: Numbers


@_LOOSE
class ChannelShape(TypedDict):
    """Channels of a rank to its peers, or of a switch to groups of ranks."""

    channel_type: ChannelType
    connected_to: NotRequired[Numbers]
    buffer_type: NotRequired[MemoryName]
    rank_groups: NotRequired[Annotated[list[RankGroupShape], Field(max_length=MAX_LIST)]]


@_LOOSE
class RemoteShape(TypedDict):
    """A buffer of another rank."""

    rank: Number
    type: MemoryName
    access_channel_types: Annotated[list[str], Field(max_length=8)]


@_LOOSE
class SemaphoreShape(TypedDict):
    """A semaphore of a rank."""

    init_value: Number


@_LOOSE
class GpuShape(TypedDict):
    """A rank."""

    id: Number
    input_chunks: Chunks
    output_chunks: Chunks
    scratch_chunks: Chunks
    threadblocks: Annotated[list[BlockShape], Field(max_length=MAX_LIST)]
    channels: Annotated[list[ChannelShape], Field(max_length=MAX_LIST)]
    remote_buffers: Annotated[list[RemoteShape], Field(max_length=MAX_LIST)]
    semaphores: NotRequired[Annotated[list[SemaphoreShape], Field(max_length=MAX_LIST)]]


@_LOOSE
class PlanShape(TypedDict):
    """The whole plan."""

    name: str
    collective: str
    protocol: str
    inplace: bool
    gpus: Annotated[list[GpuShape], Field(min_length=2, max_length=MAX_LIST)]
    reuse_resources: NotRequired[bool]
    use_double_scratch_buffer: NotRequired[bool]
    buffer_alignment: NotRequired[Number]
    min_message_size: NotRequired[Bytes]
    max_message_size: NotRequired[Bytes]
    num_threads_per_block: NotRequired[Number]
