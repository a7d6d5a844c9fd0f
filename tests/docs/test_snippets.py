from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.snippets import PAGES, Snippet, lay_out, parts, program, run_shell, snippets, words
from tests.support.commands import Command

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

WITH_SNIPPETS = [page for page in PAGES if any(one.kind != "text" for one in snippets(page))]
WITH_LONG = [page for page in WITH_SNIPPETS if any("long" in one.note for one in snippets(page))]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_what_a_page_tells_to_type(
    page: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, command, tmp_path, monkeypatch, long=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", WITH_LONG)
def test_what_takes_long(
    page: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_page(page, command, tmp_path, monkeypatch, long=True)


def run_page(
    page: str, command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, *, long: bool
) -> None:
    """The snippets of a page from top to bottom, in one folder."""
    monkeypatch.chdir(folder)
    lay_out(folder, long=long)
    printed = ""
    left_out = False
    for one in snippets(page):
        place = f"{page}:{one.line}"
        if one.kind == "output":
            if not left_out:
                check_output(one, printed, place)
            continue
        left_out = "skip" in one.note or ("long" in one.note and not long)
        if left_out or one.kind == "text":
            continue
        if one.kind == "python":
            printed = run_python(one, folder, place)
        else:
            printed = run_commands(one, command, folder, place)


def run_commands(one: Snippet, command: Command, folder: Path, place: str) -> str:
    printed, expected = "", int(one.note.get("status", 0))
    status = 0
    for is_synth, text in parts(one.text):
        if is_synth:
            said = command(*words(text))
            status, out, err = said.status, said.out, said.err
        else:
            ran = run_shell(text, folder)
            status, out, err = ran.returncode, ran.stdout, ran.stderr
        assert status in {0, expected}, f"{place}: {text}\nstatus {status}\n{out[-2000:]}{err[-4000:]}"
        printed += out + err  # as a terminal shows them
    assert "status" not in one.note or status == expected, place
    return printed


def run_python(one: Snippet, folder: Path, place: str) -> str:
    if "file" in one.note:
        (folder / one.note["file"]).write_text(one.text + "\n")
        return ""
    script = folder / f"snippet_{one.line}.py"
    script.write_text(program(one))
    how = f"torchrun --standalone --nproc-per-node {one.note['ranks']}" if "ranks" in one.note else "python"
    ran: subprocess.CompletedProcess[str] = run_shell(f"{how} {script.name}", folder)
    assert ran.returncode == 0, f"{place}\n{ran.stdout[-2000:]}{ran.stderr[-4000:]}"
    return ran.stdout


def check_output(one: Snippet, printed: str, place: str) -> None:
    """Each line that a page shows was printed, in this order; spaces do not count."""
    said = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in filter(None, (" ".join(line.split()) for line in one.text.splitlines())):
        assert any(line == other for other in said), f"{place}: {line!r} is not in\n{printed}"


# ----------------------------------------------------------------------------------- how they are read


def test_what_is_left_out_says_why() -> None:
    reasons = [one.note["skip"] for page in WITH_SNIPPETS for one in snippets(page) if "skip" in one.note]
    assert all(len(reason) > 8 for reason in reasons), reasons
    assert len(reasons) <= 17, reasons  # three need GPUs, two several hosts, two JAX with several devices


def test_commands_are_told_from_what_stands_between_them() -> None:
    alone = "synth show a.yaml  # what > there is"
    others = "cat > b.yaml <<'END'\nsynth show\nEND\nsynth show b.yaml | head"
    assert list(parts(f"{alone}\n{others}")) == [(True, alone), (False, others)]


@pytest.mark.parametrize(("shown", "fits"), [("a  b\n\nd", True), ("d\na b", False), ("a", False)])
def test_shown_lines_must_be_printed_in_order(shown: str, fits: bool) -> None:
    one = Snippet("output", shown, {}, 1)
    if fits:
        check_output(one, "a b\nc\nd\n", "page")
        return
    with pytest.raises(AssertionError, match=re.escape("page: ")):
        check_output(one, "a b\nc\nd\n", "page")
