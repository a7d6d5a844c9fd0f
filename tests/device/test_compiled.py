"""The kernel compiled for GPUs that are not here: order of memory, width of accesses, and no spills."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: pip install arborcast[device]")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arborcast.backends.device import executor
from arborcast.backends.device.executor import AMD, TYPES, element_constants, least_block
from arborcast.backends.device.kernel import run_schedule
from arborcast.synth.errors import InputError

NVIDIA = (80, 90, 100)
WARPS = 4
STORES = hasattr(triton.language, "atomic_store")  # since 3.9
OBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def made(target: GPUTarget, dtype: torch.dtype, folder: Path, *, aligned: bool = True) -> Any:
    """The kernel as an executor asks for it."""
    vector = 16 // dtype.itemsize
    block = least_block(WARPS * target.warp_size, vector)
    constants = element_constants(dtype, adds=True) | {"OP": "sum", "BLOCK": block}
    constants |= {"VECTOR": vector, "ALIGN": vector if aligned else 1}
    names = run_schedule.arg_names
    kinds = dict.fromkeys(("rows", "items", "groups", "addresses"), "*i64") | {"counters": "*i32"}
    kinds |= {"given": "i64", "result": "i64"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        run_schedule,
        {name: kinds.get(name, "i32") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        return triton.compile(source, target, options={"num_warps": WARPS})


def check_nvidia(architecture: int, dtype: torch.dtype, folder: Path) -> None:
    kernel = made(GPUTarget("cuda", architecture, 32), dtype, folder)
    ptx = kernel.asm["ptx"]
    if STORES:
        first, *others = [found.start() for found in re.finditer(r"st\.relaxed\.sys", ptx)]
        after, before = (found.start() for found in re.finditer(r"fence\.\w+\.sys", ptx))  # no more of them
        assert len(others) == 1 and ptx.rindex("bar.sync", 0, first) < before < first
        assert re.search(r"ld\.relaxed\.sys", ptx[:after]) and "atom." not in ptx
        raised = [first]
    else:
        raised = [found.start() for found in re.finditer(r"atom\.\S*exch", ptx)]
        assert raised and all("sys.release" in ptx[at : at + 40] for at in raised)
        assert re.search(r"(ld|atom)\.global\.sys\.acquire", ptx)
    for at in raised:  # no thread writes between the barrier and the flag that one raises
        assert "st.global" not in ptx[ptx.rindex("bar.sync", 0, at) : at]
    assert re.search(r"ld\.global\.v[24]", ptx) and re.search(r"st\.global\.v[24]", ptx)
    widths = {int(lanes) * int(bits) for lanes, bits in re.findall(r"st\.global\.v(\d)\.b(\d+)", ptx)}
    assert widths == {128}
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    used = subprocess.run(
        [OBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
    ).stdout
    assert "LOCAL:0 " in used, used


def writes_are_ordered(code: str) -> bool:
    """Whether all waves' writes are over at the barrier before each flag, and go through to peers.

    On AMD a barrier waits for no writes; `s_waitcnt vmcnt(0)` of each wave before it does.
    """
    lines = code.splitlines()
    barriers = [at for at, line in enumerate(lines) if "s_barrier" in line]
    flag = "global_store_dword v" if STORES else "global_atomic_swap"  # the counter's address is scalar
    raised = [at for at in range(barriers[-1], len(lines)) if flag in lines[at] and ", off" in lines[at]]
    for at in raised[: 1 if STORES else None]:  # the others follow the first
        barrier = max(one for one in range(at) if "s_barrier" in lines[one])
        if not any("buffer_wbl2" in line for line in lines[barrier:at]):
            return False
        before = lines[:barrier][::-1]
        over = next(number for number, line in enumerate(before) if "s_waitcnt vmcnt(0)" in line)
        if any(
            re.search(r"global_store|flat_store|buffer_store", line)
            for line in (*before[:over], *lines[barrier:at])
        ):
            return False
    return bool(raised) and bool(re.search(r"buffer_inv", code))


def check_amd(architecture: str, dtype: torch.dtype, folder: Path) -> None:
    code = made(GPUTarget("hip", architecture, 64), dtype, folder).asm["amdgcn"]
    assert writes_are_ordered(code)
    # Of elements of one byte by descriptors of buffers, whose offsets then fit into 32 bits.
    assert re.search(r"(global|buffer)_load_dwordx4", code) and re.search(
        r"(global|buffer)_store_dwordx4", code
    )
    # Scalar registers may go to lanes of others; nothing to memory.
    assert ".vgpr_spill_count: 0" in code and ".private_segment_fixed_size: 0" in code


@pytest.mark.parametrize("architecture", NVIDIA)
def test_on_nvidia_flags_follow_what_they_tell_of(architecture: int, tmp_path: Path) -> None:
    check_nvidia(architecture, torch.bfloat16, tmp_path)


@pytest.mark.parametrize("architecture", AMD)
def test_on_amd_flags_follow_what_they_tell_of(architecture: str, tmp_path: Path) -> None:
    check_amd(architecture, torch.bfloat16, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_for_every_type(dtype: torch.dtype, tmp_path: Path) -> None:
    for architecture in NVIDIA:
        check_nvidia(architecture, dtype, tmp_path)
    for name in AMD:
        check_amd(name, dtype, tmp_path)


def test_other_gpus_of_amd_are_refused_as_their_writes_stay_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = made(GPUTarget("hip", "gfx908", 64), torch.float32, tmp_path).asm["amdgcn"]
    assert not writes_are_ordered(code)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for name in ("gfx908:sramecc+", "gfx942:sramecc+:xnack-"):
        found = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=found: found)
        if name.startswith("gfx908"):
            with pytest.raises(InputError, match="must be one of gfx90a, gfx942, gfx950, got gfx908"):
                executor._wave(torch.device("cuda", 0))
        else:
            assert executor._wave(torch.device("cuda", 0)) == 64
