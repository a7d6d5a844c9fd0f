"""What schedulers say of hosts and switches: Slurm's files and expressions, topograph's graph, lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from arborcast.synth.errors import InputError
from arborcast.topologies.readers.schedulers import HostTree, hostlist, read_host_list, read_host_tree
from tests.support.refusals import refuses

TREE = """
- topology: big
  cluster_default: true
  tree:
    switches:
      - {switch: root, children: 's[1-2]'}
      - {switch: s1, nodes: 'node[01-02]'}
      - {switch: s2, nodes: 'node03,login'}
- topology: other
  flat: true
"""
CONF = """
# two leaves
SwitchName=root Switches=s[1-2] LinkSpeed=100
switchname=s1 Nodes=node[01-02]
SwitchName=s2 Nodes=node03,login   # the last
"""
GRAPH = """{"instances": [
  {"id": "node01", "type": "H100", "network_layers": ["s1", "root"]},
  {"id": "node02", "network_layers": ["s1", "root"], "attributes": {}},
  {"id": "node03", "network_layers": ["s2", "root"]}, {"id": "login", "network_layers": ["s2", "root"]}]}"""
ABOVE = {"node01": "s1", "node02": "s1", "node03": "s2", "login": "s2", "s1": "root", "s2": "root"}


def above(tree: HostTree) -> dict[str, str]:
    """What hangs under what: of each link, the end that was named first is below."""
    fabric = tree.topology
    names = [*tree.names, *(switch.name for switch in fabric.switches)]
    found = {}
    for link in fabric.links:
        assert (link.bandwidth, link.latency_us) == (1, 0)
        below, over = sorted((link.src, link.dst), key=lambda v: names.index(names[v]))
        if below < fabric.ranks:
            found[names[below]] = names[over]
    return found


def read(tmp_path: Path, text: str, name: str = "topology.yaml") -> HostTree:
    file = tmp_path / name
    file.write_text(text)
    tree = read_host_tree(file)
    assert tree is not None
    return tree


@pytest.mark.parametrize(
    ("name", "text"), [("topology.yaml", TREE), ("topology.conf", CONF), ("graph.json", GRAPH)]
)
def test_three_files_of_one_cluster(tmp_path: Path, name: str, text: str) -> None:
    tree = read(tmp_path, text, name)
    assert tree.names == ("node01", "node02", "node03", "login")
    assert above(tree) == {host: ABOVE[host] for host in tree.names}
    switches = [switch.name for switch in tree.topology.switches]
    ends = {
        frozenset((tree.topology.label(link.src), tree.topology.label(link.dst)))
        for link in tree.topology.links
        if link.src >= tree.topology.ranks and link.dst >= tree.topology.ranks
    }
    assert sorted(switches) == ["root", "s1", "s2"]
    assert ends == {frozenset(("s1", "root")), frozenset(("s2", "root"))}


def test_blocks_of_blocks(tmp_path: Path) -> None:
    """Sizes 2 and 4: two blocks in a row are one of four hosts; the three of them hang together."""
    text = """
- topology: cabinets
  block:
    block_sizes: [2, 4]
    blocks: [{block: a, nodes: 'n[1-2]'}, {block: b, nodes: 'n[3-4]'}, {block: c, nodes: 'n[5-6]'}]
"""
    for tree in (
        read(tmp_path, text),
        read(
            tmp_path,
            "BlockName=a Nodes=n[1-2]\nBlockName=b Nodes=n[3-4]\nBlockName=c Nodes=n[5-6]\nBlockSizes=2,4\n",
            "topology.conf",
        ),
    ):
        fabric = tree.topology
        names = [*tree.names, *(switch.name for switch in fabric.switches)]
        pairs = {frozenset((names[link.src], names[link.dst])) for link in fabric.links}
        expected = [("a", "4 hosts, 0"), ("b", "4 hosts, 0"), ("c", "4 hosts, 1")]
        expected += [("4 hosts, 0", "all blocks"), ("4 hosts, 1", "all blocks")]
        expected += [(f"n{n}", "abc"[(n - 1) // 2]) for n in range(1, 7)]
        assert pairs == set(map(frozenset, expected))


def test_hosts_of_one_nvlink_domain_stand_nearest(tmp_path: Path) -> None:
    text = """{"instances": [
      {"id": "a", "network_layers": ["leaf"], "attributes": {"nvlink": "d1"}},
      {"id": "b", "network_layers": ["leaf"], "attributes": {"nvlink": "d1"}},
      {"id": "c", "network_layers": ["leaf"]}]}"""
    assert above(read(tmp_path, text, "graph.json")) == {"a": "nvlink d1", "b": "nvlink d1", "c": "leaf"}


@refuses("text", "message")
def test_what_is_no_tree_of_hosts(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "topology"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_host_tree(file)
    assert str(caught.value).startswith(str(file))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([TREE, CONF, GRAPH]), st.integers(0, 400), st.integers(0, 12), st.text(max_size=4))
def test_mangled_files_end_in_one_line(tmp_path: Path, text: str, place: int, lost: int, new: str) -> None:
    file = tmp_path / "mangled"
    file.write_text(text[:place] + new + text[place + lost :], encoding="utf-8")
    try:
        read_host_tree(file)
    except InputError as error:
        assert "\n" not in str(error)


def test_other_files_are_left_to_others(tmp_path: Path) -> None:
    file = tmp_path / "fabric.yaml"
    file.write_text("name: pair\nranks: 2\nlinks: [{between: [0, 1], bandwidth: 1}]\n")
    assert read_host_tree(file) is None
    assert read_host_tree(tmp_path / "no file") is None


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=5)
)
def test_expressions_stand_for_their_names(ranges: list[tuple[int, int, int]]) -> None:
    written = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges)
    names = [
        f"n{number:0{max(width, len(str(first)))}d}-x"
        for first, more, width in ranges
        for number in range(first, first + more + 1)
    ]
    assert hostlist(f"n[{written}]-x", "here") == names


def test_what_expressions_mean() -> None:
    assert hostlist("a[1-2]b[3,5], c", "here") == ["a1b3", "a1b5", "a2b3", "a2b5", "c"]
    for text in ("a[1-2", "a]1", "a[[1]]", "a[2-1]", "a[x]", "a b"):
        with pytest.raises(InputError, match=r"^here: "):
            hostlist(text, "here")


def test_a_file_of_hosts_may_say_how_many_ranks_each_has(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# mine\nnode[1-2] slots=8\nlast:4\n\nplain\n")
    assert read_host_list(str(file)) == (("node1", 8), ("node2", 8), ("last", 4), ("plain", None))
    assert read_host_list("node[1-2]") == (("node1", None), ("node2", None))
    for text, message in (
        ("# nobody\n", r"hosts: must name at least one host"),
        ("a slots=2\nb slots=0\n", r"hosts: line 2: slots must be at least 1, got 0"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_host_list(str(file))
