"""Mutation testing: a module is changed in one place at a time, and its tests must notice.

    python tests/mutants.py [MODULE ...] [--within S] [--report FILE] [--jobs N] [--list]

A mutant is a module with one expression or statement changed (`changes_of`). The tests that `TARGETS` names
run once on the module itself, which says how long each takes and what of the module it calls. A mutant then
is a forked process in which the changed function stands in place of the other one, and which runs the tests
that call it, short ones first. What passes them, and what is changed outside of functions, runs all tests in
a process that imports the changed module. No file is touched.

Survivors are printed with their line. A mutant that no test can tell from the module is named, with the
reason, in `mutants_equivalent.txt`; a name there that no mutant has any more is an error, so that the list
stays true. Mutants run in an order of their own (`drawn`), so that those that `--within` leaves time for are
a fixed sample. Exit status 1 where others survive.

Kernels of numba run as plain Python, because their cache on disk does not see every change of a constant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import math
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NoReturn

HOME = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).resolve().parent / "mutants_equivalent.txt"
SLOWER = 3
"""How many times as much processor time as the module itself a mutant may take until it is killed."""
WAITS_S = 120.0
"""Seconds that it may take besides, where it waits for what does not come, or others have the processor."""

BARS = ("simulation/test_bars.py",)
CERTIFICATION = ("verification/test_certification.py",)
PIPELINE = ("planning/test_pipeline_simulator.py",)
SIMULATION = ("simulation/test_simulator.py", "simulation/test_switches.py")
SYMMETRIC = ("verification/test_implicit_verifier.py", "verification/test_machine_replay.py")
TIMES = "verification/test_certified_times.py"
VERIFIER = ("verification/test_verifier.py", "verification/test_switch_use.py")

TARGETS: dict[str, tuple[str, ...]] = {
    "synth.verification.verifier": (*VERIFIER, *SYMMETRIC, "values/test_features.py"),
    "synth.verification.verdict": (*VERIFIER, TIMES),
    "synth.verification.replay": VERIFIER,
    "synth.verification.replay_kernels": SYMMETRIC,
    "synth.verification.switch_use": ("verification/test_switch_use.py",),
    "synth.verification.group_check": ("verification/test_group_check.py", SYMMETRIC[0]),
    "synth.verification.every_translate": (*SYMMETRIC, "verification/test_switch_use.py"),
    "synth.certification.proven_rates": CERTIFICATION,
    "synth.certification.metric": CERTIFICATION,
    "synth.certification.tree_costs": CERTIFICATION,
    "synth.certification.exact_paths": CERTIFICATION,
    "synth.certification.cheapest_spanning": ("kernels/test_spanning.py",),
    "synth.certification.steiner": ("verification/test_steiner.py",),
    "synth.certification.windows": (TIMES,),
    "synth.certification.tolls": (TIMES,),
    "synth.chunks.bounds.step_check": ("chunks/test_step_certification.py",),
    "synth.chunks.bounds.spanning_check": ("chunks/test_spanning_costs.py",),
    "synth.chunks.bounds.flow_check": ("chunks/test_flow_certificates.py",),
    "synth.simulation.events": SIMULATION,
    "synth.simulation.hops": (*SIMULATION, "implicit/test_orbit_timelines.py"),
    "synth.simulation.implicit_simulator": ("implicit/test_orbit_timelines.py",),
    "synth.simulation.pieces": ("simulation/test_piece_rules.py", "group/test_pieces.py"),
    "synth.simulation.service": SIMULATION,
    "synth.simulation.simulator": (
        *SIMULATION,
        "simulation/test_message_costs.py",
        "implicit/test_orbit_timelines.py",
        "implicit/test_implicit_simulator.py::test_orders_that_tell_the_links_of_an_orbit_apart_are_refused",
    ),
    "synth.simulation.timing": BARS,
    "synth.lp.choice": ("packing/test_weights.py",),
    "synth.lp.branch_and_bound": ("packing/test_branch_and_bound.py",),
    "synth.bounds.time_limits": ("bounds/test_time_limits.py",),
    "synth.ports": ("bounds/test_streams.py",),
    "synth.selection": ("values/test_selection.py",),
    "synth.baselines.host_network": ("baselines/test_host_orders.py",),
    "synth.baselines.order_costs": ("baselines/test_host_orders.py",),
    "backends.lowering.lower": ("executors/test_interpreter.py", "lowering/test_program.py"),
    "backends.lowering.additions": ("lowering/test_additions.py",),
    "pipeline.costs.link_costs": ("planning/test_allreduce_cost.py",),
    "pipeline.order.zero_bubble": ("planning/test_orders.py",),
    "pipeline.run.gradients": ("training/test_gradient_buffer.py",),
    "pipeline.simulation.deliveries": PIPELINE,
    "pipeline.simulation.link_sharing": PIPELINE,
    "pipeline.simulation.lower_bound": ("planning/test_pipeline_bound.py",),
    "pipeline.simulation.pass_simulator": PIPELINE,
    "pipeline.simulation.synchronisation": PIPELINE,
    "pipeline.simulation.timeline": BARS,
}
LEFT_OUT = (
    "bounds/test_time_limits.py::test_nothing_simulates_faster",
    "bounds/test_time_limits.py::test_no_exchange_of_blocks_that_differ_simulates_faster",
    "bounds/test_time_limits.py::test_switches_that_add_and_copy_do_not_go_below_it",
    "planning/test_allreduce_cost.py::test_the_prediction_has_the_schedules_own_time",
    *(
        f"simulation/test_simulator.py::test_{name}"
        for name in (
            "agrees_with_another_simulator",
            "links_are_busy_for_what_they_carry_and_never_twice",
            "never_faster_than_the_rate",
            "the_engine_leaves_no_order_open_on_links_of_one_sender",
        )
    ),
    *(
        f"simulation/test_switches.py::test_{name}"
        for name in (
            "a_large_message_approaches_the_rate",
            "never_faster_than_links_and_adders",
            "what_a_switch_can_do_better_costs_no_time_along_one_tree",
            "with_whole_pieces_a_switch_without_limits_is_a_relay",
        )
    ),
    "values/test_selection.py::test_choices_ascend_and_each_is_the_fastest_where_it_begins",
    "values/test_selection.py::test_nothing_is_faster_between_the_sizes_of_the_table",
    "values/test_selection.py::test_tables_of_machines_hold_between_their_sizes",
)
"""Tests that take most of the time of their file where kernels are plain Python: mutants die without them."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of a module.

    Attributes:
        module: its dotted name.
        line: where the change is.
        name: what tells it from all others and outlives changes elsewhere: the function, what was and what
            is, and which of several alike.
        source: the whole changed module.
    """

    module: str
    line: int
    name: str
    source: ast.Module


def changes_of(node: ast.AST) -> Iterator[ast.AST]:  # noqa: PLR0912 - a table of cases
    """What a node may become, each a single change of meaning."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                changed = copy.deepcopy(node)
                changed.ops[index] = COMPARISONS[type(operator)]()
                yield changed
        case ast.BinOp() if type(node.op) in OPERATIONS:
            changed_operation = copy.deepcopy(node)
            changed_operation.op = OPERATIONS[type(node.op)]()
            yield changed_operation
        case ast.BoolOp():
            swapped = copy.deepcopy(node)
            swapped.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield swapped
            for index in range(len(node.values)):  # one condition left out
                kept = [value for other, value in enumerate(node.values) if other != index]
                yield kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.IfExp():
            yield node.body
            yield node.orelse
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int()):
            yield ast.Constant(node.value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            other = copy.deepcopy(node)
            other.func = ast.Name(FUNCTIONS[name], ast.Load())
            yield other
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module, in the order of its lines."""
    tree = ast.parse(_path(module).read_text(encoding="utf-8"))
    found: list[Mutant] = []
    alike: Counter[str] = Counter()

    def visit(parent: ast.AST, where: str) -> None:
        for field, value in ast.iter_fields(parent):
            if field in {"annotation", "returns", "decorator_list"}:
                continue
            places = value if isinstance(value, list) else [value]
            for index, node in enumerate(places):
                if not isinstance(node, ast.AST):
                    continue
                for change in changes_of(node):
                    short = f"{where}: {_words(node)} -> {_words(change)}"
                    alike[short] += 1
                    name = short if alike[short] == 1 else f"{short} [{alike[short]}]"
                    put = ast.copy_location(change, node)
                    if isinstance(value, list):
                        value[index] = put
                    else:
                        setattr(parent, field, put)
                    changed = ast.fix_missing_locations(copy.deepcopy(tree))
                    found.append(Mutant(module, getattr(node, "lineno", 0), f"{module} {name}", changed))
                    if isinstance(value, list):
                        value[index] = node
                    else:
                        setattr(parent, field, node)
                inner = where
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    inner = f"{where}.{node.name}".lstrip(".")
                visit(node, inner)

    visit(tree, "")
    return found


def _path(module: str) -> Path:
    return HOME / f"{module.replace('.', '/')}.py"


def _words(node: ast.AST) -> str:
    """Source text on one line."""
    return " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())


# ----------------------------------------------------------------------------------------------- running


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads a changed module in place of the one on disk."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"arborcast.{self.mutant.module}":
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(_path(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(_path(self.mutant.module))
        exec(compile(self.mutant.source, module.__file__, "exec"), module.__dict__)


class _Loop:
    """Runs what pytest collected: once as it is, and once, in a forked process, for every mutant."""

    def __init__(self, mutants: Sequence[Mutant], jobs: int, within_s: float, pipe: Connection) -> None:
        self.mutants, self.jobs, self.within_s, self.pipe = mutants, jobs, within_s, pipe
        self.items: list[Any] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        """In place of pytest's own loop."""
        file = str(importlib.import_module(f"arborcast.{self.mutants[0].module}").__file__)
        self.items = session.items
        ours, theirs = multiprocessing.Pipe()
        child = os.fork()
        if not child:
            theirs.send(self._measured(session, file))
            _end(0)
        theirs.close()
        try:
            measured: list[tuple[float, set[_Place]]] | None = ours.recv()
        except EOFError:
            measured = None
        os.waitpid(child, 0)
        self.pipe.send(measured and sum(seconds for seconds, _ in measured))
        if measured is None:
            return True
        units = _units(compile(_path(self.mutants[0].module).read_text(encoding="utf-8"), file, "exec"))

        def start(mutant: Mutant) -> tuple[int, float]:
            changed = _changed(units, _units(compile(mutant.source, file, "exec")))
            calls = [at for at, (_, places) in enumerate(measured) if changed and places & set(changed)]
            order = sorted(calls or range(len(self.items)), key=lambda at: measured[at][0])
            processor_s = 2 + SLOWER * sum(measured[at][0] for at in order)
            child = os.fork()
            if not child:
                _alone(processor_s)
                if not changed or not _put(changed, file):
                    os._exit(0)  # passes for now, and is tried again
                for at in order:
                    self._run(self.items[at])
                    if session.testsfailed:
                        _end(1)
                _end(0)
            return child, processor_s

        end = time.monotonic() + self.within_s
        for mutant, passes in _verdicts(self.mutants, start, self.jobs, end):
            self.pipe.send((self.mutants.index(mutant), passes))
        self.pipe.send(None)  # what a test has left behind may keep the pipe open
        return True

    def _run(self, item: Any) -> None:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def _measured(self, session: Any, file: str) -> list[tuple[float, set[_Place]]] | None:
        """Of every test the processor time and the functions that it calls; None where one fails."""
        found = []
        for item in self.items:
            places: set[_Place] = set()

            def note(frame: FrameType, event: str, _: object, places: set[_Place] = places) -> None:
                if event == "call" and frame.f_code.co_filename == file:
                    places.add((frame.f_code.co_qualname, frame.f_code.co_firstlineno))

            begun = time.process_time()
            threading.setprofile(note)
            sys.setprofile(note)
            self._run(item)
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            found.append((time.process_time() - begun, places))
            if session.testsfailed:
                return None
        return found


_Place = tuple[str, int]
"""A function: its qualified name and its first line."""


def _units(code: CodeType) -> dict[_Place, CodeType | tuple[object, ...]]:
    """The functions of a module that are in no other; of it and its classes what else they hold."""
    rest = tuple(each for each in code.co_consts if not isinstance(each, CodeType))
    found: dict[_Place, CodeType | tuple[object, ...]] = {}
    found[code.co_qualname, code.co_firstlineno] = (code.co_code, repr(rest), code.co_names)
    for inner in (each for each in code.co_consts if isinstance(each, CodeType)):
        if inner.co_flags & inspect.CO_OPTIMIZED:
            found[inner.co_qualname, inner.co_firstlineno] = inner
        else:
            found |= _units(inner)
    return found


def _changed(
    units: dict[_Place, CodeType | tuple[object, ...]], others: dict[_Place, CodeType | tuple[object, ...]]
) -> dict[_Place, CodeType]:
    """The functions that differ; none where more than functions does."""
    differ = {place: code for place, code in others.items() if units.get(place) != code}
    return (
        {place: code for place, code in differ.items() if isinstance(code, CodeType)}
        if all(isinstance(code, CodeType) for code in differ.values())
        else {}
    )


def _put(changed: dict[_Place, CodeType], file: str) -> bool:
    """Give functions their changed code, whoever holds them; whether each was found."""
    found = set()
    for held in gc.get_objects():
        if not isinstance(held, FunctionType) or held.__code__.co_filename != file:
            continue
        code = held.__code__
        if (place := (code.co_qualname, code.co_firstlineno)) in changed:
            held.__code__ = changed[place]
            found.add(place)
        elif any(code.co_qualname.startswith(f"{name}.<locals>") for name, _ in changed):
            return False  # made by a call when the module was imported
    return found == set(changed)


def _alone(processor_s: float) -> None:
    """Of a forked process: a group of its own, silent, with so much processor time."""
    os.setsid()
    limit = math.ceil(processor_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def _pytest(tests: Sequence[str], *options: str, plugin: object = None) -> int:
    import pytest

    from tests.support import forked_solvers, ranks

    # What starts anew would load the module from disk; what is forked from here has the mutant.
    ranks.PROCESSES = ranks.FORKS  # type: ignore[assignment]
    forked_solvers.server = str  # type: ignore[assignment]  # none for each mutant
    given = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutants", *options]
    given += [f"--deselect=tests/{test}" for test in LEFT_OUT]
    files = [str(HOME / "tests" / test) for test in tests]
    return int(pytest.main([*given, *files], plugins=[plugin] if plugin else None))


def _anew(mutant: Mutant, tests: Sequence[str], processor_s: float) -> int:
    """A forked process that imports the mutant and runs all tests; it ends with 0 where they pass."""
    child = os.fork()
    if child:
        return child
    _alone(processor_s)
    sys.meta_path.insert(0, _Instead(mutant))
    try:
        status = _pytest(tests, "-x")
    except BaseException:
        status = 1
    _end(1 if status else 0)


def _end(status: int) -> NoReturn:
    """End this process, and those that its tests have started."""
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(status)


def _verdicts(
    mutants: Sequence[Mutant], start: Callable[[Mutant], tuple[int, float]], jobs: int, end: float
) -> Iterator[tuple[Mutant, bool]]:
    """Mutants with whether their processes end with 0, as they end; none is started after `end`.

    Args:
        start: gives the process of a mutant and the processor time it has.
    """
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < jobs and time.monotonic() < end:
            mutant = waiting.pop()
            child, processor_s = start(mutant)
            running[child] = mutant, time.monotonic() + WAITS_S + processor_s
        if not running:
            return
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            mutant, _ = running.pop(child)
            yield mutant, os.waitstatus_to_exitcode(status) == 0
            continue
        for late in [process for process, (_, last) in running.items() if time.monotonic() > last]:
            os.killpg(late, signal.SIGKILL)
        time.sleep(0.01)


def verdicts(
    mutants: Sequence[Mutant], tests: Sequence[str], jobs: int, within_s: float
) -> Iterator[tuple[Mutant, bool]]:
    """Mutants with whether their tests pass all the same, as far as the time goes.

    Raises:
        SystemExit: the tests fail without any change.
    """
    ours, theirs = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            _pytest(tests, "-s", plugin=_Loop(mutants, jobs, within_s, theirs))
        finally:
            os._exit(0)
    theirs.close()
    again: list[Mutant] = []
    try:
        unchanged_s = ours.recv()
        while unchanged_s is not None and (verdict := ours.recv()) is not None:
            number, passes = verdict
            if passes:
                again.append(mutants[number])
            else:
                yield mutants[number], False
    except EOFError:
        pass
    os.waitpid(child, 0)
    if not unchanged_s:
        raise SystemExit(f"{', '.join(tests)}: must pass before anything is changed")
    processor_s = 10 + SLOWER * unchanged_s  # and what importing takes

    def start(mutant: Mutant) -> tuple[int, float]:
        return _anew(mutant, tests, processor_s), processor_s

    yield from _verdicts(again, start, jobs, math.inf)


def drawn(mutants: Sequence[Mutant]) -> list[Mutant]:
    """In an order that has nothing to do with where they are, and that changes elsewhere leave as it is."""
    return sorted(mutants, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())


# ---------------------------------------------------------------------------------------------- reporting

_COLUMNS = "| module | mutants | tried | killed | equivalent | surviving | at |"
NOT_RUN = "not run"


def reported(page: str, rows: dict[str, str], known: dict[str, str]) -> str:
    """The page with these rows of the table in place of the former ones, and all that is named equivalent.

    Rows are by module; a target without a row is said not to have been run.
    """
    before, _, former = page.partition(_COLUMNS)
    lines = {line.split("`")[1]: line for line in former.splitlines() if line.startswith("| `")} | rows
    table = [_COLUMNS, "|---|---:|---:|---:|---:|---:|---|"]
    table += [lines.get(module, f"| `{module}` | | {NOT_RUN} | | | | |") for module in TARGETS]
    named = [f"- `{name.replace('`', '')}`: {reason}" for name, reason in sorted(known.items())]
    return "\n".join([before.rstrip(), "", *table, "", "## Equivalent", "", *named, ""])


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HOME, check=True, capture_output=True, text=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", ":!docs").strip()  # but for the report
    return git("rev-parse", "--short=9", "HEAD").strip() + (" and changes" if changed else "")


def equivalents() -> dict[str, str]:
    """The names of mutants that no test can tell from the module, each with the reason.

    A line is a name, " # " and the reason.
    """
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines()
    split = [line.split(" # ", 1) for line in lines if line and not line.startswith("#")]
    return {name.strip(): reason for name, reason in split}


def main() -> int:
    """Run what the command line names; the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"some of {', '.join(TARGETS)}")
    parser.add_argument(
        "--within", type=float, default=math.inf, metavar="S", help="seconds for the mutants of each module"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="page whose table is to say what was found"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--list", action="store_true", help="name the mutants and run nothing")
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.modules) - set(TARGETS))
    if unknown:
        parser.error(f"{unknown[0]}: must be one of {', '.join(TARGETS)}")
    sys.path[:0] = [str(HOME)]
    known = equivalents()
    failed = False
    for module in chosen.modules or TARGETS:
        mutants = mutants_of(module)
        names = {mutant.name for mutant in mutants}
        for gone in [name for name in known if name.startswith(f"{module} ") and name not in names]:
            print(f"{EQUIVALENT.name}: no mutant is called {gone!r} any more")
            failed = True
        if chosen.list:
            print("\n".join(mutant.name for mutant in mutants))
            continue
        asked = drawn([mutant for mutant in mutants if mutant.name not in known])
        tried = found = 0
        for mutant, passes in verdicts(asked, TARGETS[module], chosen.jobs, chosen.within):
            tried += 1
            found += passes
            if passes:
                where = f"{_path(module).relative_to(HOME)}:{mutant.line}"
                print(f"{where}: survives: {mutant.name}", flush=True)
        equivalent = len(mutants) - len(asked)
        how_many = "all" if tried == len(asked) else f"{tried} of {len(asked)} drawn"
        print(
            f"{module}: {len(mutants)} mutants, {equivalent} equivalent; {how_many} tried: "
            f"{tried - found} killed, {found} survive",
            flush=True,
        )
        if chosen.report:
            row = f"| `{module}` | {len(mutants)} | {how_many} | {tried - found} | {equivalent} | {found} |"
            page = chosen.report.read_text(encoding="utf-8") if chosen.report.exists() else ""
            text = reported(page, {module: f"{row} {_commit()} |"}, known)
            chosen.report.write_text(text, encoding="utf-8")
        failed |= found > 0
    return int(failed)


if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # it would load modules of ours
    # Loaded once, before forking: what the tests import, but nothing that may be a mutant.
    for heavy in ("networkx", "hypothesis", "pytest", "numba", "scipy.optimize", "highspy", "torch._dynamo"):
        importlib.import_module(heavy)
    raise SystemExit(main())
