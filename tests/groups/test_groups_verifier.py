"""The joint checker objects to whatever is not as declared; folders keep everything; all run at once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest

from arborcast import synth, topologies
from arborcast.synth.collective import Collective, Kind
from arborcast.synth.errors import InputError
from arborcast.synth.groups import JointCertificate, along, solve_groups, verify_groups
from arborcast.synth.groups.group_folder import read_groups, write_groups
from arborcast.synth.groups.shared_simulator import simulate_groups
from arborcast.synth.schedule import Chunk
from tests.support.drawn_in_network import TURNS, drawn, star


@pytest.fixture(scope="module")
def found():
    dgx1 = topologies.load("dgx1")
    groups = [
        Collective.on(dgx1, "allreduce", ranks=range(4)),
        Collective.on(dgx1, "alltoall", ranks=[6, 5, 4]),
    ]
    return solve_groups(dgx1, groups, weights=[1, Fraction(1, 2)])


def with_group(found, number, **changed):
    groups = list(found.groups)
    groups[number] = replace(groups[number], **changed)
    return replace(found, groups=tuple(groups))


def with_level(found, number, **changed):
    levels = list(found.certificate.levels)
    levels[number] = replace(levels[number], **changed)
    return replace(found, certificate=replace(found.certificate, levels=tuple(levels)))


def test_what_is_right_is_correct(found):
    verdict = verify_groups(found)
    assert (verdict.correct, verdict.errors, verdict.max_link_load) == (True, (), 1)
    assert verdict.worst == found.certificate.worst == min(g.rate / g.weight for g in found.groups)
    for group in found.groups:
        assert synth.verify(group.schedule).correct
        assert group.schedule.rate >= group.rate


def objections(wrong):
    return "\n".join(verify_groups(wrong, max_errors=1000).errors)


def test_rates_that_do_not_fit_the_links(found):
    text = objections(with_group(found, 0, rate=found.rates[0] * 2, alone=Fraction(10**6)))
    assert "GB/s of all groups together, its bandwidth is" in text
    assert "group 0: 200 GB/s per unit of weight, its level says 100 GB/s" in text


def test_a_rate_above_what_the_group_reaches_alone(found):
    assert "group 1:" in objections(with_group(found, 1, alone=Fraction(1)))
    assert "GB/s among others, 1 GB/s alone" in objections(with_group(found, 1, alone=Fraction(1)))


def test_a_wrong_schedule(found):
    schedule = found.groups[0].schedule
    broken = replace(schedule, transfers=schedule.transfers[:-1])
    assert "group 0: chunk" in objections(with_group(found, 0, written=broken))
    other = replace(schedule, topology=replace(schedule.topology, name="another"))
    assert "group 0: its schedule is of another, another fabric" in objections(
        with_group(found, 0, written=other)
    )


def test_a_wrong_certificate(found):
    level = found.certificate.levels[0]
    assert "declared, its lengths prove" in objections(with_level(found, 0, bound=level.bound + 1))
    assert "is above its bound" in objections(with_level(found, 0, bound=level.rate / 2))
    zero = (Fraction(0),) * len(level.lengths)
    assert "no group without a rate travels" in objections(with_level(found, 0, lengths=zero))
    assert "needs one length per link" in objections(with_level(found, 0, lengths=zero[1:]))
    longer = tuple(length + 1 for length in level.lengths)
    assert "lengths" in objections(with_level(found, 0, lengths=longer))
    assert "must name each of the 2 groups once" in objections(with_level(found, 0, groups=()))
    upside_down = JointCertificate(found.certificate.levels[::-1], True)
    assert not verify_groups(replace(found, certificate=upside_down)).correct


def test_ranks_of_others_where_they_must_not_be_passed(found):
    wrong = replace(found, certificate=replace(found.certificate, relays=False))
    assert "group 0: passes rank" in objections(wrong)


def test_switches_that_groups_do_not_share():
    """What adders and trees of several groups take together is counted nowhere."""
    hub = star(3, TURNS)
    on_hub = solve_groups(hub, [Collective.on(hub, "broadcast")])
    inside = drawn(hub, Kind.BROADCAST, [Chunk(Fraction(1), 0)], ["0>3:0", "3>1:0 3>2:0"])
    wrong = with_group(on_hub, 0, written=inside)
    assert "group 0: adds or multicasts in switches, which groups" in objections(wrong)


def lines_of_torus():
    torus = topologies.load("torus:3x3")
    groups = along(torus, [3, 3], 0, "allreduce") + along(torus, [3, 3], 1, "allgather")
    return solve_groups(torus, groups)


def test_groups_that_are_alike_share_a_schedule(tmp_path):
    found = lines_of_torus()
    assert len({id(group.written) for group in found.groups}) == 2
    assert verify_groups(found).correct
    for group in found.groups:  # written out, each is right by itself, which the joint check infers
        verdict = synth.verify(group.schedule)
        assert verdict.correct, verdict.errors
        assert group.schedule.collective == group.collective
        assert verdict.rate == group.schedule.rate == group.written.rate
    paths = write_groups(found, tmp_path / "groups")
    assert len(set(paths)) == 2
    again = read_groups(tmp_path / "groups")
    assert again == found and verify_groups(again).correct


def test_images_that_are_no_symmetry():
    found = lines_of_torus()
    images = found.groups[1].images
    swapped = (images[1], images[0], *images[2:])
    assert "images: maps link" in objections(with_group(found, 1, images=swapped))
    assert "images: must name each" in objections(with_group(found, 1, images=images[:-1]))
    identity = tuple(range(9))
    assert "images: must take the collective" in objections(with_group(found, 1, images=identity))
    assert "its schedule is of another" in objections(with_group(found, 1, images=None))


@pytest.mark.parametrize(
    ("images", "message"),
    [([0] * 9, "groups[1].images: must name each of the 9 vertices once"), (3, "groups[1].images")],
)
def test_images_in_a_file_that_are_none(images, message, tmp_path):
    write_groups(lines_of_torus(), tmp_path / "groups")
    path = tmp_path / "groups" / "groups.json"
    document = json.loads(path.read_text())
    document["groups"][1]["images"] = images
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=re.escape(message)):
        read_groups(path.parent)


def test_folder_and_back(found, tmp_path):
    folder = tmp_path / "groups"
    paths = write_groups(found, folder)
    assert [path.name for path in paths] == ["group-0.json", "group-1.json"]
    assert read_groups(folder) == found
    assert synth.read_schedule(paths[1]) == found.groups[1].schedule
    assert sorted(path.name for path in folder.iterdir()) == ["group-0.json", "group-1.json", "groups.json"]
    write_groups(found, folder)  # again, over what is there
    assert verify_groups(read_groups(folder)).correct


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format="x"), "format: must be arborcast.groups/1, got 'x'"),
        (
            lambda d: d["groups"][1].update(file="../a.json"),
            r"groups\[1\].file: must be a file of the folder",
        ),
        (lambda d: d["groups"][0].update(rate="-1"), r"groups\[0\].rate: must be positive, got -1"),
        (
            lambda d: d["groups"][0].update(ranks=[0, 1]),
            r"groups\[0\]: must be the collective of group-0.json",
        ),
        (
            lambda d: d["certificate"]["levels"][0]["lengths"][0].update(to=77),
            r"levels\[0\].lengths\[0\]: must name a link of the topology, got 0->77",
        ),
        (lambda d: d["certificate"].update(levels=[]), "certificate.levels: must have at least one"),
        (lambda d: d.pop("certificate"), "certificate"),
    ],
)
def test_a_wrong_file_is_one_line(found, tmp_path, change, message):
    write_groups(found, tmp_path)
    path = tmp_path / "groups.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as caught:
        read_groups(tmp_path)
    assert "\n" not in str(caught.value)
    assert "groups.json" in str(caught.value)


def test_what_is_in_the_way_of_a_folder(found, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="must be a folder to write to, got a file"):
        write_groups(found, tmp_path / "file")
    with pytest.raises(InputError, match=r"its parent folder .* does not exist"):
        write_groups(found, tmp_path / "a" / "b")
    with pytest.raises(InputError, match=r"groups\.json: cannot be read"):
        read_groups(tmp_path)


def test_one_group_takes_as_long_as_its_schedule(found):
    dgx1 = found.topology
    single = solve_groups(dgx1, [Collective.on(dgx1, "allreduce", ranks=range(4))])
    [timing] = simulate_groups(single, [1 << 20], pieces=4)
    assert timing == synth.simulate(single.groups[0].schedule, 1 << 20, pieces=4)


def test_together_takes_longer_than_alone():
    full = topologies.load("full:4")
    group = Collective.on(full, "allgather")
    both = solve_groups(full, [group, group])
    size = 1 << 24
    [alone] = simulate_groups(solve_groups(full, [group]), [size])
    first, second = simulate_groups(both, [size, size])
    assert max(first.time_us, second.time_us) == pytest.approx(2 * alone.time_us, rel=0.05)
    assert simulate_groups(both, [size, 1])[1].time_us < second.time_us / 2
    with pytest.raises(InputError, match="must be one for each of the 2 groups, got 1"):
        simulate_groups(both, [size])
    with pytest.raises(InputError, match="size 0: must be from 1 byte"):
        simulate_groups(both, [size, 0])
    with pytest.raises(InputError, match="pieces 0: must be at least 1"):
        simulate_groups(both, [1, 1], pieces=0)
