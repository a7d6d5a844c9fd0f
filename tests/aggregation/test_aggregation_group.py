"""The process group "synth" on a fabric whose switch adds and multicasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from arborcast.backends.options import Options  # noqa: E402
from arborcast.backends.schedules.fabric import fabric_for  # noqa: E402
from arborcast.synth.errors import InputError  # noqa: E402
from arborcast.synth.topology import Switch  # noqa: E402
from tests.support.in_network import aggregators, star, two_levels  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402
from tests.support.waiting import until  # noqa: E402

STAR = """\
name: pod
ranks: 4
switches: [{name: spine, reduces: true, multicasts: true, turns: true}]
links:
- {between: [0, spine], bandwidth: 1}
- {between: [1, spine], bandwidth: 1}
- {between: [2, spine], bandwidth: 1}
- {between: [3, spine], bandwidth: 1}
"""


def train(rank: int, size: int) -> list[Any]:
    found: list[Any] = []
    for dtype in (torch.float32, torch.int32, torch.bfloat16):
        data = torch.full((300_000,), rank + 1).to(dtype)
        dist.all_reduce(data)
        found.append(data.unique().tolist())
    data = torch.full((300_000,), float(rank))
    dist.all_reduce(data, op=dist.ReduceOp.AVG)
    dist.broadcast(data, 0)
    found.append(data.unique().tolist())
    some = dist.new_group([0, 2, 3])  # a job of its own, while the other goes on
    if rank != 1:
        data = torch.full((300_000,), float(rank))
        dist.all_reduce(data, group=some)
        dist.all_reduce(data, group=some)
        found.append(data.unique().tolist())
    dist.all_reduce(data)
    group: Any = dist.distributed_c10d._get_default_group()
    found.append(group.explain(1 << 20))
    dist.destroy_process_group()
    return found


@pytest.mark.long
def test_a_group_uses_the_switch_of_its_fabric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fabric = tmp_path / "pod.yaml"
    fabric.write_text(STAR, encoding="utf-8")
    with aggregators(1) as (made, options):
        where = made[0]
        environ = {
            "ARBORCAST_TOPOLOGY": str(fabric),
            "ARBORCAST_AGGREGATORS": f"spine={where.host}:{where.port}",
            "ARBORCAST_AGGREGATOR_TOKEN": str(options.aggregator_token),
        }
        found = run_ranks(4, train, backend="synth", environ=environ, timeout_s=200)
        until(lambda: where.served == 2)
    sums: list[Any] = [[10.0], [10], [10.0], [1.5]]
    assert [one[:4] for one in found] == [sums] * 4
    assert found[0][4] == found[2][4] == found[3][4] == [15.0]
    assert "1 GB/s, optimal) from" in found[0][-1]
    assert "failed" not in caplog.text


def test_switches_only_forward_where_no_process_plays_them() -> None:
    given = two_levels(2, 2)
    fabric = fabric_for(Options(topology=given), range(4), 4)
    assert fabric.topology == given.forwarding and not fabric.aggregators


def test_addresses_go_to_the_switches_of_the_fragment() -> None:
    addresses = tuple((name, ("10.0.0.1", port)) for port, name in enumerate(["top", "leaf1", "leaf0"], 7000))
    options = Options(topology=two_levels(2, 2), aggregators=addresses, aggregator_token="0" * 32)
    whole = fabric_for(options, range(4), 4)
    assert whole.aggregators == {4: ("10.0.0.1", 7002), 5: ("10.0.0.1", 7001), 6: ("10.0.0.1", 7000)}
    pair = fabric_for(options, [2, 3], 4)
    assert [switch.name for switch in pair.topology.switches] == ["leaf1"]
    assert pair.aggregators == {2: ("10.0.0.1", 7001)}


@pytest.mark.parametrize(
    ("environ", "topology", "why"),
    [
        ("10.0.0.1", star(2), "ARBORCAST_AGGREGATORS=.*must be HOST:PORT such as .*, got '10.0.0.1'"),
        ("10.0.0.1:x", star(2), "port must be in 0..65535, got 'x'"),
        ("::1:7000", star(2), "must be HOST:PORT"),
        ("10.0.0.1:0", star(2), "ports must be in 1..65535"),
        ("a=h:1,a=h:2", star(2), "must name each switch once, names a twice"),
        ("a=h:1,b=h:1", star(2), "must name a process of its own for each switch, names h:1 twice"),
        ("a=h:1,h:2", star(2), "must name the switch of each process, or of none"),
        ("t=h:1", star(2), r"each switch of star-2 that reduces or multicasts \(s\), got t$"),
        ("h:1,h:2", star(2), r"\(s\), got 2 without names$"),
        ("h:1", star(2, Switch("s")), r"\(there is none\), got 1 without names$"),
        ("h:1", None, "aggregators: must be those of a fabric's switches, and none is given"),
        ("s=h:1", star(2), "aggregator_token: must be the token that synth aggregate prints"),
    ],
)
def test_addresses_that_do_not_fit_are_refused_in_one_line(environ: str, topology: Any, why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        options = Options(topology=topology).merged({"ARBORCAST_AGGREGATORS": environ})
        fabric_for(options, range(2), 2)
    assert "\n" not in str(caught.value)


def test_a_token_is_32_digits() -> None:
    with pytest.raises(InputError, match=r"ARBORCAST_AGGREGATOR_TOKEN=.*must be the 32 hexadecimal digits"):
        Options.from_environment({"ARBORCAST_AGGREGATOR_TOKEN": "secret"})
