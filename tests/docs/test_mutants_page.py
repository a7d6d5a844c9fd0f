"""The page of mutants says of every target what was tried, and no mutant survives there."""

from __future__ import annotations

from pathlib import Path

from tests import mutants

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "explanation" / "mutants.md"


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0].strip("`"): line[1:] for line in cells}


def test_every_target_has_its_row_and_no_mutant_survives() -> None:
    found = rows()
    assert list(found) == list(mutants.TARGETS)
    ran = {module: row for module, row in found.items() if row[1] != mutants.NOT_RUN}
    assert ran
    for module, (count, tried, killed, equivalent, surviving, commit) in ran.items():
        assert surviving == "0", f"{module}: {surviving} survive"
        asked = int(count) - int(equivalent)
        assert tried in ("all", f"{killed} of {asked} drawn"), module
        assert tried != "all" or int(killed) == asked, module
        assert len(commit) == 9, f"{module}: {commit}"


def test_every_equivalent_mutant_stands_there_with_its_reason() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, reason in mutants.equivalents().items():
        assert f"- `{name.replace('`', '')}`: {reason}\n" in page


def test_rows_are_kept_until_their_module_runs_again() -> None:
    first, second, *_ = mutants.TARGETS
    page = mutants.reported("# Head\n", {first: f"| `{first}` | one |"}, {"a": "b"})
    again = mutants.reported(page, {second: f"| `{second}` | two |"}, {"a": "b"})
    assert again.startswith("# Head\n\n| module |")
    assert f"| `{first}` | one |\n| `{second}` | two |\n" in again
    assert again.endswith("\n## Equivalent\n\n- `a`: b\n")
