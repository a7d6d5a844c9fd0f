"""What a picture says."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree


def words(path: Path) -> list[str]:
    """The texts of an SVG: matplotlib draws letters as paths and keeps what they say in a comment."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    root = ElementTree.parse(path, ElementTree.XMLParser(target=builder)).getroot()
    return [(element.text or "").strip() for element in root.iter() if element.tag is ElementTree.Comment]
