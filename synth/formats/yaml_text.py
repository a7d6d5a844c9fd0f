"""Plain values out of YAML text, for files of unknown origin.

YAML is read event by event, without its traps: an alias is refused (so nothing can expand), a tag is
refused (so no object is made), a key stands once, `no` and `on` are text, 1:30 is text and not 90, and a
decimal is the exact number that was written. Nesting costs no recursion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

import yaml

from arborcast.synth.errors import InputError
from arborcast.synth.formats.numerals import parse_number, shorten

MAX_NESTING = 32

_WHOLE = re.compile(r"[-+]?[0-9]+")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


@dataclass(slots=True)
class _Open:
    """A list or a mapping whose end has not come yet; `key` waits for its value."""

    values: list[object] | dict[str, object]
    key: str | None = None
    keys: set[str] = field(default_factory=set)


def parse_yaml(text: str, place: str) -> object:
    """The value of the one document in the text; None when there is none.

    Raises:
        InputError: not YAML, or one of the things that are refused; with line and column.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the compiled one where there is one
    reader = _Reader(place)
    try:
        for event in yaml.parse(text, Loader=loader):
            reader.take(event)
    except InputError:  # a ValueError too, and already one line
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{place}: {where}must be YAML: {_flat(error.problem)}") from error
    except yaml.YAMLError as error:
        raise InputError(f"{place}: must be YAML: {_flat(str(error))}") from error
    except (ValueError, IndexError, RecursionError) as error:  # bugs of the YAML library on odd input
        raise InputError(f"{place}: must be YAML: {_flat(str(error))}") from error
    return reader.document


def _flat(text: str | None) -> str:
    return " ".join((text or "it cannot be read").split())[:200]


class _Reader:
    """Builds the value out of the events, holding on to what is still open."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.document: object = None
        self.documents = 0
        self.open: list[_Open] = []

    def take(self, event: yaml.Event) -> None:
        match event:
            case yaml.ScalarEvent():
                self.put(event, self.scalar(event))
            case yaml.DocumentStartEvent():
                self.documents += 1
                if self.documents > 1:
                    self.refuse(event, "must hold one document, got another")
            case yaml.AliasEvent():
                self.refuse(event, f"must not use aliases, got *{shorten(event.anchor)}")
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                self.start(event)
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                self.open.pop()

    def start(self, event: yaml.SequenceStartEvent | yaml.MappingStartEvent) -> None:
        if event.tag is not None and not event.implicit:
            self.refuse(event, f"must not use tags, got {shorten(event.tag)}")
        if len(self.open) >= MAX_NESTING:
            self.refuse(event, f"must be nested at most {MAX_NESTING} deep")
        values: list[object] | dict[str, object] = [] if isinstance(event, yaml.SequenceStartEvent) else {}
        self.put(event, values)
        self.open.append(_Open(values))

    def put(self, event: yaml.Event, value: object) -> None:
        """Give a value its place in what is open: a key, the value of a key, an item, the document."""
        if not self.open:
            self.document = value
            return
        inner = self.open[-1]
        if isinstance(inner.values, list):
            inner.values.append(value)
        elif inner.key is not None:
            inner.values[inner.key] = value
            inner.key = None
        elif not isinstance(value, str):
            self.refuse(event, f"a key must be text, got {shorten(value)}")
        elif value in inner.keys:
            self.refuse(event, f"key {shorten(value)} must stand once in its mapping, got it twice")
        else:
            inner.keys.add(value)
            inner.key = value

    def scalar(self, event: yaml.ScalarEvent) -> object:
        text = str(event.value)
        if event.tag is not None and not event.implicit[0] and not event.implicit[1]:
            self.refuse(event, f"must not use tags, got {shorten(event.tag)}")
        if not event.implicit[0]:  # quoted
            return text
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        try:
            if _WHOLE.fullmatch(text):
                return int(parse_number(text))
            return parse_number(text) if _DECIMAL.fullmatch(text) else text
        except ValueError as error:
            self.refuse(event, str(error))

    def refuse(self, event: yaml.Event, rule: str) -> NoReturn:
        mark = event.start_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InputError(f"{self.place}: {where}{rule}")
