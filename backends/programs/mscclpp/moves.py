"""Operations of plans that move data, as the executor does them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arborcast.backends.programs.mscclpp.entries import (
    Entry,
    Reading,
    a_list,
    a_number,
    an_object,
)
from arborcast.backends.programs.mscclpp.lists import BlockLists
from arborcast.backends.programs.mscclpp.spans import Cut
from arborcast.backends.programs.program import (
    Flush,
    Memory,
    Move,
    Operation,
    ProgramError,
    Signal,
    Synchronize,
)

_PUTS = {"put", "pws", "pwsf", "ppkt", "rppkt"}
_LOCAL = {"copy", "cpkt", "upkt"}
_SUMS = {"re", "res", "rre", "rres", "repkt", "respkt", "recpkt", "recspkt"}
_SWITCHED = {"glres", "gstore", "gstorepkt"}
_PACKETS = {"ppkt", "rppkt", "cpkt", "upkt", "repkt", "respkt", "recpkt", "recspkt", "gstorepkt"}
MOVES = _PUTS | _LOCAL | _SUMS | _SWITCHED | {"get"}


class Moves:
    """Those of one thread block."""

    def __init__(self, reading: Reading, lists: BlockLists) -> None:
        self._reading = reading
        self._lists = lists

    def of(
        self, name: str, kind: str, entry: Entry, where: str, part: tuple[int, int] | None
    ) -> Iterator[Operation]:
        """What an operation of this name does."""
        sources = [an_object(one, where) for one in a_list(entry, "src_buff", where, 256)]
        targets = [an_object(one, where) for one in a_list(entry, "dst_buff", where, 256)]
        if not sources or not targets:
            raise ProgramError(f"{where}: needs src_buff and dst_buff")
        if name in _PACKETS and part is not None:
            self._reading.note(f"{where}: packets know nothing of iterations; each handles all")
            part = None
        group = None
        if "tbg_info" in entry:
            info = an_object(entry["tbg_info"], where)
            size = a_number(info, "tbg_size", where, 1, 4096)
            group = a_number(info, "tb_id", where, 0, size - 1), size
            if part is not None:
                self._reading.fault(
                    f"{where}: tbg_info in a pipeline; later iterations run beyond the block's part"
                )
                part = None
        cut = Cut(self._reading, self._lists, kind, where, group, part)
        if name in _PUTS:
            yield from self._puts(name, kind, sources, targets, entry, where, cut)
        elif name == "get":
            yield self._get(kind, sources, targets, where, cut)
        elif name in _LOCAL:
            count = cut.count(sources[0])
            self._one(sources, targets, where)
            first = cut.local(
                sources[0], count, packets=name == "upkt", always=Memory.SCRATCH if name == "upkt" else None
            )
            yield Move((first,), (cut.local(targets[0], count, packets=name == "cpkt"),))
        elif name in _SUMS:
            yield self._sum(name, kind, sources, targets, where, cut)
        else:
            yield self._switched(name, sources, targets, where, cut)

    def _one(self, sources: Sequence[Entry], targets: Sequence[Entry], where: str) -> None:
        if len(sources) > 1 or len(targets) > 1:
            self._reading.note(f"{where}: only the first of src_buff and dst_buff are looked at")

    def _puts(  # noqa: PLR0912  (a rule a branch)
        self,
        name: str,
        kind: str,
        sources: Sequence[Entry],
        targets: Sequence[Entry],
        entry: Entry,
        where: str,
        cut: Cut,
    ) -> Iterator[Operation]:
        if kind not in {"memory", "port"}:
            self._reading.note(f"{where}: does nothing with channel_type {kind}")
            return
        of_targets = not name.endswith("pkt")  # which of the two sizes the runtime takes
        channels = self._lists.connections("port", entry, where) if kind == "port" else ()
        if kind == "port" and not channels:
            raise ProgramError(f"{where}: needs a port channel, channel_ids names none")
        if kind == "port" and len(channels) < len(targets):
            self._reading.fault(
                f"{where}: {len(channels)} channel_ids for {len(targets)} buffers; others use the "
                "first channel"
            )
            channels += channels[:1] * len(targets)
        if name == "ppkt" and kind == "port":
            self._reading.note(f"{where}: sends packets as they are, from the executor's first plan")
        packed = name == "rppkt" or (name == "ppkt" and kind == "port")
        for at, target in enumerate(targets):
            source = sources[0] if name == "rppkt" else sources[at] if at < len(sources) else None
            if source is None:
                self._reading.note(
                    f"{where}: src_buff has {len(sources)} entries, dst_buff {len(targets)}; "
                    "others begin at 0"
                )
                source = {**sources[0], "index": 0, "size": 0}
                if not of_targets:
                    continue
            elif kind == "memory" and source.get("type") != sources[0].get("type"):
                self._reading.note(
                    f"{where}: the runtime reads all from the kind of buffer of the first src_buff"
                )
                source = {**source, "type": sources[0].get("type")}
            count = cut.count(target if of_targets else source)
            read = cut.local(
                source, count, packets=packed, always=Memory.SCRATCH if name == "rppkt" else None
            )
            write = cut.remote(target, count, packets=not of_targets)
            if kind == "memory":
                yield Move((read,), (write,))
            else:
                if name == "rppkt" and not at:
                    yield Move((read,), ())
                    yield Synchronize()
                yield Move((read,), (write,), channels[at], at)
        if name in {"pws", "pwsf"}:
            if kind == "memory":
                self._reading.note(f"{where}: signals nothing on memory channels")
                return
            yield Signal(channels[: len(targets)])
            if name == "pwsf":
                yield Flush(channels[: len(targets)])

    def _get(
        self, kind: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: Cut
    ) -> Move:
        if kind != "memory":
            raise ProgramError(f"{where}: is for memory channels, got {kind}")
        self._one(sources, targets, where)
        count = cut.count(sources[0])
        if sources[0].get("index") != targets[0].get("index"):
            self._reading.note(f"{where}: the runtime exchanges where source and target begin")
        source = {**sources[0], "index": targets[0].get("index")}
        target = {**targets[0], "index": sources[0].get("index")}
        return Move((cut.remote(source, count),), (cut.local(target, count),))

    def _sum(
        self, name: str, kind: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: Cut
    ) -> Move:
        packets = name.endswith("pkt")
        sends = name in {"res", "rres", "respkt", "recspkt"}
        if (sends or name in {"rre", "rres"}) and kind != "memory" and len(sources) + len(targets) > 2:
            raise ProgramError(f"{where}: is for memory channels, got {kind}")
        count = cut.count(sources[0])
        read = [cut.local(sources[0], count)]
        for source in sources[1:]:
            if packets:
                read.append(cut.local(source, count, packets=True, always=Memory.SCRATCH))
            else:
                read.append(
                    cut.remote(source, count) if name in {"rre", "rres"} else cut.local(source, count)
                )
        write = [cut.local(targets[0], count)]
        rest = list(targets[1:])
        if name in {"recpkt", "recspkt"}:
            if not rest:
                raise ProgramError(f"{where}: needs two local buffers in dst_buff")
            write.append(cut.local(rest.pop(0), count, packets=True))
        if rest and not sends:
            self._reading.note(f"{where}: writes the first of dst_buff alone")
        write += [cut.remote(target, count, packets=packets) for target in rest if sends]
        return Move(tuple(read), tuple(write))

    def _switched(
        self, name: str, sources: Sequence[Entry], targets: Sequence[Entry], where: str, cut: Cut
    ) -> Move:
        self._one(sources, targets, where)
        count = cut.count(sources[0])
        if name == "glres":
            read = cut.group(sources[0], count)
        else:
            read = (cut.local(sources[0], count, packets=name == "gstorepkt"),)
        write = cut.group(targets[0], count, packets=name == "gstorepkt")
        return Move(read, write, switch=True)
