"""Mutation testing: a module is changed in one place at a time, and its tests must notice.

    python tests/mutants.py [MODULE ...] [--jobs N] [--list]

A mutant is a module with one expression or statement changed (`changes_of`). Each one runs in a forked
process that loads it in place of the module and runs the tests named in `TARGETS`; no file is touched.
Survivors are printed with their line. A mutant that no test can tell from the module is named, with the
reason, in `mutants_equivalent.txt`; a name there that no mutant has any more is an error, so that the list
stays true. Exit status 1 where others survive.

Kernels of numba run as plain Python, because their cache on disk does not see every change of a constant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

HOME = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).resolve().parent / "mutants_equivalent.txt"
SLOWER = 3
"""How many times as much processor time as the module itself a mutant may take until it is killed."""
WAITS_S = 120.0
"""Seconds that it may take besides, where it waits for what does not come, or others have the processor."""
UNCHANGED_S = 3600
"""Processor time within which the tests of a module itself must pass."""

TARGETS: dict[str, tuple[str, ...]] = {
    "synth.verification.verifier": ("verification/test_verifier.py",),
    "synth.verification.verdict": ("verification/test_verifier.py",),
    "synth.verification.replay": ("verification/test_verifier.py",),
    "synth.verification.switch_use": ("verification/test_switch_use.py",),
    "synth.certification.rates": ("verification/test_certification.py",),
    "synth.certification.metric": ("verification/test_certification.py",),
    "synth.certification.trees": ("verification/test_certification.py",),
    "synth.certification.ways": ("verification/test_certification.py",),
    "synth.simulation.events": ("simulation/test_simulator.py",),
    "backends.lowering.lower": ("executors/test_interpreter.py", "lowering/test_program.py"),
    "pipeline.run.gradients": ("training/test_gradient_buffer.py",),
}
LEFT_OUT = (
    "simulation/test_simulator.py::test_the_choice_of_pieces_keeps_large_schedules_within_a_second",
    "simulation/test_simulator.py::test_many_pieces_of_a_large_message_approach_the_rate",
    "simulation/test_simulator.py::test_agrees_with_another_simulator",
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


def _start(tests: Sequence[str], mutant: Mutant | None, processor_s: int) -> int:
    """A forked process that runs the tests; it ends with 0 where all pass within that processor time."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (processor_s, processor_s))
    if mutant is not None:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.meta_path.insert(0, _Instead(mutant))
    import pytest

    from tests.support import ranks

    # What starts anew would load the module from disk; what is forked from here has the mutant.
    ranks.PROCESSES = ranks.FORKS  # type: ignore[assignment]
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile=mutants"]
    options += [f"--deselect=tests/{test}" for test in LEFT_OUT]
    try:
        status = pytest.main([*options, *(str(HOME / "tests" / test) for test in tests)])
    except BaseException:
        status = pytest.ExitCode.INTERNAL_ERROR
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0 if status == pytest.ExitCode.OK else 1)


def survivors(mutants: Sequence[Mutant], tests: Sequence[str], jobs: int) -> Iterator[Mutant]:
    """Those whose tests pass, as they end.

    Raises:
        SystemExit: the tests fail without any change.
    """
    _, status, usage = os.wait4(_start(tests, None, UNCHANGED_S), 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"{', '.join(tests)}: must pass before anything is changed")
    processor_s = math.ceil(1 + SLOWER * (usage.ru_utime + usage.ru_stime))
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(mutants))
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            end = time.monotonic() + WAITS_S + processor_s
            running[_start(tests, mutant, processor_s)] = mutant, end
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            mutant, _ = running.pop(child)
            if os.waitstatus_to_exitcode(status) == 0:
                yield mutant
            continue
        for late in [process for process, (_, end) in running.items() if time.monotonic() > end]:
            os.killpg(late, signal.SIGKILL)
        time.sleep(0.01)


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
        asked = [mutant for mutant in mutants if mutant.name not in known]
        found = 0
        for mutant in survivors(asked, TARGETS[module], chosen.jobs):
            found += 1
            print(f"{_path(module).relative_to(HOME)}:{mutant.line}: survives: {mutant.name}", flush=True)
        print(
            f"{module}: {len(mutants)} mutants, {len(asked) - found} killed, "
            f"{len(mutants) - len(asked)} equivalent, {found} survive",
            flush=True,
        )
        failed |= found > 0
    return int(failed)


if __name__ == "__main__":
    os.environ["NUMBA_DISABLE_JIT"] = "1"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # it would load modules of ours
    # Loaded once, before forking: what the tests import, but nothing that may be a mutant.
    for heavy in ("networkx", "hypothesis", "pytest", "numba", "scipy.optimize", "highspy", "torch._dynamo"):
        importlib.import_module(heavy)
    raise SystemExit(main())
