"""Files named .gz are compressed, to the same bytes each time; what is broken or too large is one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from arborcast.synth.api import solve
from arborcast.synth.errors import InputError
from arborcast.synth.formats.any_schedule import read_schedule, write_schedule
from arborcast.synth.formats.reading import read_text
from arborcast.topologies import load


@pytest.mark.parametrize("form", ["explicit", "implicit"])
def test_a_compressed_schedule_comes_back(tmp_path: Path, form: str) -> None:
    schedule = solve(load("torus:3x3"), "allgather", form=form)  # type: ignore[call-overload]
    plain, packed, again = (tmp_path / name for name in ("a.json", "a.json.gz", "b.json.gz"))
    for path in (plain, packed, again):
        write_schedule(schedule, path)
    assert read_schedule(packed) == schedule
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()
    assert len(packed.read_bytes()) * 2 < len(plain.read_bytes())


def test_what_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.json.gz"
    path.write_bytes(gzip.compress(b'{"format": "arborcast.schedule/1"}' * 100)[:-12])
    with pytest.raises(InputError, match=r"cut.json.gz: must be whole as a gzip file"):
        read_schedule(path)


def test_limits_hold_for_what_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b" " * 1_000_001))
    with pytest.raises(InputError, match="must be at most 1000000 bytes, got more"):
        read_text(path, max_bytes=1_000_000)
