"""The tests that ship with torch, as one configuration wants them.

Tests decide by the name of the backend whether they apply. They are imported as those of gloo, whose
capabilities "synth" promises, and run with the backend in question: so all backends run the same tests.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from arborcast.bench.suite import compiled, gpu_on_cpu
from arborcast.bench.suite.forked import Ending, run_forked

TESTS = "torch.testing._internal.distributed.distributed_test"
UNDER_RPC = "torch.testing._internal.distributed.ddp_under_dist_autograd_test"
BY_NAME = ("test_accumulate_gradients",)
"""Tests that prepare nothing for backends whose name they do not know."""

PATIENCE_S = 60
"""How long the barrier of files around each test waits; torch's 10 s are short on a busy machine."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A way to run tests.

    Attributes:
        name: in tables.
        ranks: that each test has.
        tests: which: "all", those that want "GPUs", those "profiled", those that want exactly so many
            "ranks", those under "rpc", or the forms of "compile".
        store: "file" or "tcp".
        environment: set while they run.
    """

    name: str
    ranks: int
    tests: str = "all"
    store: str = "file"
    environment: Mapping[str, str] = field(default_factory=dict)


CONFIGURATIONS = (
    Configuration("file store", 3),
    Configuration("TCP store", 3, store="tcp"),
    Configuration("profiler events expected", 3, "profiled"),
    Configuration("TORCH_DISTRIBUTED_DEBUG=DETAIL", 3, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}),
    Configuration("GPU tests on CPU tensors", 3, "GPUs"),
    Configuration("4 ranks", 4, "ranks"),
    Configuration("8 ranks", 8, "ranks"),
    Configuration("DDP under dist_autograd", 6, "rpc"),
    Configuration("torch.compile", 2, "compile"),
)


def applies(configuration: Configuration, backend: str) -> bool:
    """Whether the tests of a configuration check anything on a backend.

    Torch expects events that begin with the name which the group was made by; of "cpu:synth" they begin with
    "synth", as those of "cpu:gloo" do with "gloo".
    """
    return configuration.tests != "profiled" or ":" not in backend


def run_cases(
    configuration: Configuration, backend: str, *, only: str, deadline_s: float
) -> Iterator[tuple[str, Ending]]:
    """Run the tests of a configuration in this process's children, each with how it ended.

    Args:
        configuration: how and which.
        backend: "gloo", "synth", "cpu:synth".
        only: a part of the names of those to run; all where empty.
        deadline_s: for each test.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ.update(configuration.environment)
        os.environ.update(
            BACKEND="gloo", WORLD_SIZE=str(configuration.ranks), MASTER_ADDR="127.0.0.1", TEMP_DIR=place
        )
        if backend != "gloo":
            importlib.import_module("arborcast.backends.group.process_group")  # once, not in every rank
        if configuration.tests == "compile":
            importlib.import_module("torch._dynamo.backends.debugging")
        tests = _tests(configuration, backend)
        skips = _skips()
        for name in sorted(tests):
            if only in name:
                (folder / "barrier").mkdir(exist_ok=True)
                (folder / "test_dir").mkdir(exist_ok=True)
                for left in (*folder.glob("barrier/*"), *folder.glob("test_dir/*"), folder / "store"):
                    left.unlink(missing_ok=True)
                with _address(configuration, folder) as address:
                    size, run = tests[name]
                    rank = partial(_rank, run, address)
                    yield name, run_forked(size, rank, folder=folder, deadline_s=deadline_s, skips=skips)


Run = Callable[[int, Any, str], object]
"""One rank of a test: with its number, the pipe, and where the ranks meet."""

Tests: TypeAlias = dict[str, tuple[int, Run]]
"""By name, with the number of ranks."""


def _rank(run: Run, address: str, rank: int, pipe: Any) -> object:
    return run(rank, pipe, address)


def _tests(configuration: Configuration, backend: str) -> Tests:
    match configuration.tests:
        case "compile":
            size = configuration.ranks
            return {name: (size, _form(form, backend, size)) for name, form in compiled.FORMS.items()}
        case "rpc":
            return _under_rpc(backend)
        case which:
            return _of_groups(which, configuration.ranks, backend)


def _form(form: Callable[[int, int], None], backend: str, size: int) -> Run:
    def run(rank: int, pipe: Any, address: str) -> None:
        compiled.run_form(form, rank, size, backend, address, pipe)

    return run


def _of_groups(which: str, size: int, backend: str) -> Tests:
    gpu_on_cpu.let_tests_run()
    module: Any = importlib.import_module(TESTS)
    module.BACKEND = backend
    module.Barrier.sync.__func__.__defaults__ = (None, PATIENCE_S)
    if which == "profiled":
        module.PROFILING_SUPPORTED_BACKENDS.append("synth")
        module.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("synth")

    class OfGroups(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc]
        address = ""

        @property
        def init_method(self) -> str:
            return self.address

    def one(name: str, *, wants_gpus: bool) -> Run:
        def run(rank: int, pipe: Any, address: str) -> None:
            OfGroups.address = address
            # `_run` makes the group, and bodies ask by name, too.
            module.BACKEND = "gloo" if name.startswith(BY_NAME) else backend
            if backend != module.BACKEND:
                init = module.dist.init_process_group
                module.dist.init_process_group = lambda **named: init(**{**named, "backend": backend})
            with gpu_on_cpu.working() if wants_gpus else nullcontext():
                OfGroups._run(rank, name, address.removeprefix("file://"), pipe)

        return run

    found: Tests = {}
    for name in (name for name in dir(OfGroups) if name.startswith("test_")):
        test = getattr(OfGroups, name)
        decorators = inspect.getsource(test).partition("def test_")[0]
        wants_gpus = "skip_if_no_gpu" in decorators or "skip_if_lt_x_gpu" in decorators
        wanted = re.search(r"require_(?:exact_)?world_size\((\d)\)", decorators)
        ranks = 8 if "skip_if_small_worldsize" in decorators else int(wanted[1]) if wanted else 0
        match which:
            case "GPUs":
                is_asked = wants_gpus
            case "ranks":
                is_asked = ranks == size
            case _:
                is_asked = not wants_gpus
        if is_asked and not getattr(test, "__unittest_skip__", False):
            found[name] = size, one(name, wants_gpus=wants_gpus)
    return found


def _under_rpc(backend: str) -> Tests:
    module: Any = importlib.import_module(UNDER_RPC)
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    fixture: Any = importlib.import_module(
        "torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture"
    ).TensorPipeRpcAgentTestFixture
    make = module.dist.init_process_group
    # The tests name gloo; and what they time out after is meant for machines with a core for each rank.
    module.dist.init_process_group = lambda **named: make(**{**named, "backend": backend})
    found: Tests = {}
    for cases in (module.DdpUnderDistAutogradTest, module.DdpComparisonTest):

        class Both(cases, fixture, common.MultiProcessTestCase):  # type: ignore[misc, valid-type]
            pass

        def one(name: str, tests: Any = Both) -> Run:
            return lambda rank, pipe, address: tests._run(rank, name, address.removeprefix("file://"), pipe)

        names = [name for name in dir(Both) if name.startswith("test_")]
        found |= {name: (int(Both(name).world_size), one(name)) for name in names}
    return found


def _skips() -> frozenset[int]:
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    return frozenset(skip.exit_code for skip in common.TEST_SKIPS.values())


@contextmanager
def _address(configuration: Configuration, folder: Path) -> Iterator[str]:
    """Where the ranks of one test meet."""
    if configuration.store == "file":
        yield f"file://{folder}/store"
        return
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    yield f"tcp://127.0.0.1:{port}"
