"""What a process group may be told: its fabric, its limits, its ways; from code or from the environment.

A training script is launched in many ways, so that everything a person on the cluster may have to say is an
environment variable as well. What code says wins over the environment, field by field.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from arborcast.synth.collective import NAMED_KINDS
from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import shorten
from arborcast.synth.formats.sizes import parse_size
from arborcast.synth.methods import METHODS, NEED_SIZE
from arborcast.synth.topology import Topology

if TYPE_CHECKING:
    from arborcast.synth.faults.backup_schedules import BackupSchedules
    from arborcast.synth.groups.result import GroupSchedules

log = logging.getLogger(__name__)

TRANSPORTS = ("auto", "sockets", "shared memory")
"""How bytes may travel: "auto" is shared memory inside a host and sockets between hosts."""

STARTS = ("at once", "wait")
"""What the first call of a collective does whose schedules are in no cache: go by a simple one, or wait."""

BITS = ("alike", "any")
"""Of floating-point sums: the same on all ranks, or whatever the fastest schedule gives each of them."""

MESSAGES = {"off": "", "cuda": "cuda", "cpu": "cpu", "kernel": "cuda", "kernel-cpu": "cpu"}
"""Whose calls by schedules go by grouped messages, with the type of their device: nobody's; those of tensors
on GPUs over NCCL or RCCL, who serve them by themselves otherwise; those of tensors in host memory over gloo,
to try it without a GPU. With "kernel" short ones go by the kernel of `backends.device`."""

_KNOWN_METHODS = ("auto", *(name for name in METHODS if name not in NEED_SIZE))
_MOST_RANKS = 1 << 16  # a typing error such as 0-99999999 must not fill the memory
_ELSEWHERE = frozenset({"ARBORCAST_CACHE"})  # read by `synth.kernels.cache_folder`
_warned: set[str] = set()
"""Variables of which it was said in this process that nobody reads them."""


@dataclass(frozen=True)
class Options:
    """What a group is made with; every field has a default that works.

    Attributes:
        topology: the fabric: a spec (`dgx1`), a path, or the value itself; None for a full mesh.
        ranks: the rank of the fabric that each rank of the default group is; None where they are the same.
        groups: schedules that several groups of the job run at once (`synth groups --no-relays`): the folder,
            or the value itself, or several values, whose fabric is `topology` where that is None. The first
            that has the collective of a group of the job serves it; what none has, a group does by itself.
        deadline_s: seconds that finding the schedules of one collective may take.
        gloo_below: bytes below which gloo serves; 0 for never, None for what was measured.
        transport: one of `TRANSPORTS`.
        piece_bytes: of what is in flight at once; None for what was measured.
        prepare: collectives whose schedules are looked for when the default group is made, not at the first
            call.
        start: one of `STARTS`: where schedules are not in the cache, whether a simple one serves "at once"
            while they are looked for, or calls "wait". After the change sums may have other last bits.
        address: of this host, for the other hosts, or several with commas between; None for the one that the
            store's host is reached from.
        method: "auto", or the one method (see `synth.methods`) whose schedule serves all sizes.
        lost_after_s: seconds without any answer of its kernel after which another host counts as lost; 0 for
            never. A process that is stopped or slow is waited for until the group's timeout.
        cache: whether tables and answers of solvers are kept and used on disk.
        without: links of the fabric that are down, as pairs of its ranks; both directions are left out.
        spares: schedules made before links fail (`synth repair --each-link`): files or values, one for each
            collective. One serves at once where a group does without its link, until all have been compared.
        p2p: one of `MESSAGES`: which tensors' schedules run by grouped messages of torch's own backend, or by
            the kernel.
        kernel_below: bytes below which the kernel serves, where `p2p` has it; None for what its cost model
            says of each collective.
        bits: one of `BITS`: whether schedules whose ranks add in different orders may serve an allreduce.

    Raises:
        InputError: a field breaks a rule.

    Examples:
        >>> backends.Options(topology="dgx1", ranks=[1, 4, 5, 6]).bits
        'alike'
    """

    topology: str | os.PathLike[str] | Topology | None = None
    ranks: Sequence[int] | None = None
    groups: (
        str | os.PathLike[str] | GroupSchedules | tuple[GroupSchedules, ...] | list[GroupSchedules] | None
    ) = None
    deadline_s: float = 30.0
    gloo_below: int | None = None
    transport: str = "auto"
    piece_bytes: int | None = None
    prepare: tuple[str, ...] = ("allreduce", "broadcast")
    start: str = "at once"
    address: str | None = None
    method: str = "auto"
    lost_after_s: float = 60.0
    cache: bool = True
    without: tuple[tuple[int, int], ...] = ()
    spares: tuple[str | os.PathLike[str] | BackupSchedules, ...] = ()
    p2p: str = "off"
    kernel_below: int | None = None
    bits: str = "alike"

    def __post_init__(self) -> None:
        """Check every field; lists become tuples, so that nobody changes them later."""
        if self.ranks is not None:
            object.__setattr__(self, "ranks", tuple(self.ranks))
        if isinstance(self.groups, list):
            object.__setattr__(self, "groups", tuple(self.groups))
        object.__setattr__(self, "prepare", tuple(self.prepare))
        object.__setattr__(self, "without", tuple((first, second) for first, second in self.without))
        object.__setattr__(self, "spares", tuple(self.spares))
        for name, rule_of in _RULES.items():
            value = getattr(self, name)
            rule = rule_of(value)
            if rule is not None:
                raise InputError(f"{name}: {rule}, got {_shown(value)}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Options:
        """What the ARBORCAST_* variables say; a variable that is empty says nothing.

        Raises:
            InputError: the value of a variable breaks a rule; one line with its name, the value and the rule.
        """
        return cls(**_read(environ))

    def merged(self, environ: Mapping[str, str] = os.environ) -> Options:
        """These options, with what the environment says in place of each field that has its default.

        Raises:
            InputError: as for `from_environment`, for variables of fields that were given as well.
        """
        defaults = {field.name: field.default for field in fields(self)}
        said = _read(environ)
        return replace(self, **{name: said[name] for name in said if getattr(self, name) == defaults[name]})


def _read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields that variables give, each checked."""
    found: dict[str, Any] = {}
    for variable, (name, parse) in _VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        try:
            value = parse(text)
            rule = _RULES[name](value) if name in _RULES else None
            if rule is not None:
                raise ValueError(rule)
        except ValueError as error:  # InputError is one
            raise InputError(f"{variable}={shorten(text)}: {error}") from error
        found[name] = value
    _warn_of_unknown(environ)
    return found


def _warn_of_unknown(environ: Mapping[str, str]) -> None:
    known = [*_VARIABLES, *_ELSEWHERE]
    for name in sorted(environ):
        if name.startswith("ARBORCAST_") and name not in known and name not in _warned:
            _warned.add(name)
            stems = {variable.removeprefix("ARBORCAST_"): variable for variable in known}
            near = difflib.get_close_matches(name.removeprefix("ARBORCAST_"), stems, n=1)
            hint = f"did you mean {stems[near[0]]}?" if near else f"there are {', '.join(sorted(known))}"
            log.warning("environment variable %s: nothing reads it; %s", shorten(name), hint)


def _parse_ranks(text: str) -> tuple[int, ...]:
    """Ranks such as `1,4,5,6` or `0-3,8`, in this order."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = (number.strip() for number in part.partition("-"))
        if not _is_number(first) or (dash and not _is_number(last)):
            raise ValueError(f"must be ranks such as 1,4,5,6 or 0-3,8, got {shorten(part.strip())}")
        start, end = int(first), int(last or first)
        if end < start or len(ranks) + end - start >= _MOST_RANKS:
            rule = "the last must not be below the first" if end < start else f"at most {_MOST_RANKS} ranks"
            raise ValueError(f"{rule}, got {shorten(part.strip())}")
        ranks += range(start, end + 1)
    return tuple(ranks)


def _parse_links(text: str) -> tuple[tuple[int, int], ...]:
    """Links such as `0-3,2-5`."""
    links = []
    for part in text.split(","):
        first, _, second = (number.strip() for number in part.partition("-"))
        if not _is_number(first) or not _is_number(second):
            raise ValueError(f"must be pairs of ranks of the fabric such as 0-3,2-5, got {shorten(part)}")
        links.append((int(first), int(second)))
    return tuple(links)


def _parse_paths(text: str) -> tuple[str, ...]:
    """Files such as `allreduce.json:broadcast.json`, separated as in PATH."""
    return tuple(path for path in text.split(os.pathsep) if path)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 9


def _parse_seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError("must be a number of seconds such as 30") from error


def _parse_bytes(text: str) -> int:
    try:
        return 0 if text == "0" else parse_size(text)
    except InputError as error:
        raise ValueError("must be 0 or a size such as 65536, 64KiB or 1.5MB") from error


def _parse_words(text: str) -> str:
    return text.replace("-", " ").replace("_", " ").lower()


def _ranks_rule(ranks: Sequence[int] | None) -> str | None:
    if ranks is None:
        return None
    if not ranks or any(type(rank) is not int or rank < 0 for rank in ranks):
        return "must be ranks of the fabric, from 0 on"
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if list(ranks).count(rank) > 1)
        return f"must name each rank once, names {twice} twice"
    return None


def _groups_rule(groups: object) -> str | None:
    if groups is None or isinstance(groups, str | os.PathLike):
        return None
    from arborcast.synth.groups.result import GroupSchedules

    several = groups if isinstance(groups, tuple) else (groups,)
    if all(isinstance(it, GroupSchedules) for it in several):
        return None
    return "must be a folder, or GroupSchedules, one or a list of them"


def _bytes_rule(size: int | None) -> str | None:
    return None if size is None or size >= 0 else "must be at least 0 bytes"


def _one_of(names: Sequence[str]) -> Callable[[str], str | None]:
    return lambda name: None if name in names else f"must be one of {', '.join(names)}"


def _method_rule(method: str) -> str | None:
    if method in NEED_SIZE:
        return "needs chunks, steps and rounds, which serve one schedule; auto finds the best ones"
    return None if method in _KNOWN_METHODS else f"must be one of {', '.join(_KNOWN_METHODS)}"


def _prepare_rule(kinds: Sequence[str]) -> str | None:
    known = [kind.value for kind in NAMED_KINDS]
    return None if set(kinds) <= set(known) else f"must be some of {', '.join(known)}"


def _without_rule(links: Sequence[tuple[int, int]]) -> str | None:
    if all(type(rank) is int and rank >= 0 for link in links for rank in link):
        return "must join two different ranks" if any(first == second for first, second in links) else None
    return "must be pairs of ranks of the fabric"


def _spares_rule(spares: Sequence[object]) -> str | None:
    from arborcast.synth.faults.backup_schedules import BackupSchedules

    fits = all(isinstance(it, str | os.PathLike | BackupSchedules) for it in spares)
    return None if fits else "must be files of spare schedules, or BackupSchedules"


_RULES: dict[str, Callable[[Any], str | None]] = {
    "ranks": _ranks_rule,
    "groups": _groups_rule,
    "deadline_s": lambda seconds: None if 0 < seconds < math.inf else "must be a positive number of seconds",
    "gloo_below": _bytes_rule,
    "kernel_below": _bytes_rule,
    "lost_after_s": lambda seconds: (
        None if seconds == 0 or 1 <= seconds <= 86400 else "must be 0 (never) or 1 to 86400 seconds"
    ),
    "transport": _one_of(TRANSPORTS),
    "start": _one_of(STARTS),
    "piece_bytes": lambda size: None if size is None or size >= 1 else "must be at least 1 byte",
    "prepare": _prepare_rule,
    "address": lambda address: None if address is None or address.strip() else "must not be empty",
    "method": _method_rule,
    "without": _without_rule,
    "spares": _spares_rule,
    "p2p": _one_of(tuple(MESSAGES)),
    "bits": _one_of(BITS),
}
"""For each field the rule that a value breaks, None where it breaks none."""

_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "ARBORCAST_TOPOLOGY": ("topology", str),
    "ARBORCAST_RANKS": ("ranks", _parse_ranks),
    "ARBORCAST_GROUPS": ("groups", str),
    "ARBORCAST_DEADLINE": ("deadline_s", _parse_seconds),
    "ARBORCAST_LOST_AFTER": ("lost_after_s", _parse_seconds),
    "ARBORCAST_GLOO_BELOW": ("gloo_below", _parse_bytes),
    "ARBORCAST_TRANSPORT": ("transport", _parse_words),
    "ARBORCAST_START": ("start", _parse_words),
    "ARBORCAST_METHOD": ("method", str),
    "ARBORCAST_WITHOUT": ("without", _parse_links),
    "ARBORCAST_SPARES": ("spares", _parse_paths),
    "ARBORCAST_P2P": ("p2p", str.lower),
    "ARBORCAST_KERNEL_BELOW": ("kernel_below", _parse_bytes),
    "ARBORCAST_BITS": ("bits", str.lower),
}
"""The field that each variable gives, and how it is read."""


def _shown(value: object) -> str:
    return shorten(list(value)) if isinstance(value, tuple) else shorten(value)
