"""The XML that MSCCL's own parser takes, and no more: elements, attributes in double quotes, comments.

That parser is not an XML parser: it knows no entities, no DTD, no declaration, no single quotes, no tabs, and
no line ends within an element. So neither does this, and nothing in a file can make it large.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from arborcast.backends.programs.program import ProgramError
from arborcast.synth.formats.numerals import shorten

_ELEMENT = re.compile(r'<(/?)([A-Za-z_]\w*)((?: +[A-Za-z_]\w*="[^"\n]*")*) *(/?)>')
_ATTRIBUTE = re.compile(r'([A-Za-z_]\w*)="([^"\n]*)"')
_WHOLE = re.compile(r" *-?[0-9]{1,18} *")
_BETWEEN = re.compile(r"(?:[ \n\r]|<!--.*?-->)*", re.DOTALL)
_LONGEST = 255
_DEEPEST = 16


@dataclass(slots=True)
class Element:
    """One element with its attributes and those within it."""

    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)

    def __iter__(self) -> Iterator[Element]:
        """What stands in it."""
        return iter(self.children)

    def __len__(self) -> int:
        """How many stand in it."""
        return len(self.children)

    def get(self, name: str) -> str | None:
        """An attribute, None where it is missing."""
        return self.attributes.get(name)

    def whole(
        self, name: str, least: int, most: int, where: str | None = None, default: int | None = None
    ) -> int:
        """An attribute that is a whole number.

        Args:
            name: of the attribute.
            least: the smallest it may be.
            most: the largest.
            where: what errors begin with; the tag where None.
            default: what counts where it is missing.

        Raises:
            ProgramError: it is missing, or no such number.
        """
        value, at = self.get(name), where or self.tag
        if value is None and default is not None:
            return default
        if value is None:
            raise ProgramError(f"{at}: {name} is missing")
        if not _WHOLE.fullmatch(value):
            raise ProgramError(f"{at}: {name} must be a whole number, got {shorten(value)}")
        if not least <= int(value) <= most:
            raise ProgramError(f"{at}: {name} must be in {least}..{most}, got {int(value)}")
        return int(value)


def parse(text: str) -> Element:
    """The one element that a text is.

    Raises:
        ProgramError: anything that MSCCL's parser does not take, with the line.
    """
    top = Element("", {})
    stack = [top]
    position = _BETWEEN.match(text).end()  # type: ignore[union-attr]  # matches nothing, too
    while position < len(text):
        match = _ELEMENT.match(text, position)
        if match is None:
            raise ProgramError(_why(text, position))
        closing, tag, attributes, single = match.groups()
        if closing:
            if len(stack) < 2 or stack[-1].tag != tag or attributes or single:
                raise ProgramError(
                    f"line {_line(text, position)}: </{shorten(tag)}> closes nothing that is open"
                )
            stack.pop()
        else:
            pairs = _ATTRIBUTE.findall(attributes)
            element = Element(tag, dict(pairs))
            if len(element.attributes) < len(pairs):
                raise ProgramError(
                    f"line {_line(text, position)}: an attribute of {shorten(tag)} stands twice"
                )
            if len(attributes) > _LONGEST and any(len(value) > _LONGEST for _, value in pairs):
                raise ProgramError(
                    f"line {_line(text, position)}: a value is longer than {_LONGEST} characters"
                )
            stack[-1].children.append(element)
            if not single:
                stack.append(element)
                if len(stack) > _DEEPEST:
                    raise ProgramError(f"line {_line(text, position)}: must not be nested this deep")
        position = _BETWEEN.match(text, match.end()).end()  # type: ignore[union-attr]
    if len(stack) > 1:
        raise ProgramError(f"{shorten(stack[-1].tag)} is not closed")
    if len(top) != 1:
        raise ProgramError(f"must be one element, got {len(top)}")
    return top.children[0]


def _why(text: str, position: int) -> str:
    """What MSCCL's parser does not take there."""
    end = text.find(">", position)
    element = text[position : end + 1 if end >= 0 else len(text)]
    where = f"line {_line(text, position)}: "
    if not element.startswith("<"):
        return where + f"must be an element, got {shorten(element[:40])}"
    if element.startswith("<?"):
        return where + "MSCCL's parser takes no XML declaration"
    if element.startswith("<!"):
        return where + "MSCCL's parser takes no DTD, and comments must end"
    for what, sign in (("tabs", "\t"), ("single quotes", "'"), ("line ends within an element", "\n")):
        if sign in element:
            return where + f"MSCCL's parser takes no {what}"
    return where + f"must be an element with attributes in double quotes, got {shorten(element[:40])}"


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
