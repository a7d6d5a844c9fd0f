from __future__ import annotations

from pathlib import Path

import pytest

from arborcast.synth.errors import InputError
from arborcast.topologies import load
from arborcast.topologies.readers.kinds import UNDERSTOOD, kind_of
from tests.support.tool_texts import Machine, nvidia_smi

PAIR = nvidia_smi(Machine(((((0, 1),),),), (), {}))
AMD = "LINK TYPE TABLE:\n   0000:01:00.0 0000:02:00.0\n0000:01:00.0 SELF XGMI\n0000:02:00.0 XGMI SELF\n"


@pytest.mark.parametrize(
    ("suffix", "text", "kind"),
    [
        (".txt", PAIR, "nvidia-smi"),
        ("", "<details><summary>topo</summary>\n" + PAIR, "nvidia-smi"),
        ("", "[user@node ~]$ nvidia-smi topo -m\n" + PAIR, "nvidia-smi"),
        ("", PAIR.replace("\t", ""), "nvidia-smi"),
        ("", "GPU0GPU1GPU2CPU AffinityNUMA Affinity\n", "nvidia-smi"),
        (".log", AMD, "rocm-smi"),
        ("", "[user@node ~]$ amd-smi topology\n" + AMD, "rocm-smi"),
        ("", "==== Link Type between two GPUs ====\n", "rocm-smi"),
        (".json", '[{"bdf": "0000:01:00.0", "links": []}]', "rocm-smi"),
        (".json", '{"ranks": 2, "links": []}', "JSON"),
        ("", '{"ranks": 2}', "JSON"),
        ("", '<?xml version="1.0"?><system/>', "XML"),
        ("", "<graphs/>", "XML"),
        ("", "<?xml version='1.0'?>\n<!-- of a host -->\n<topology version='2.0'/>", "lstopo"),
        (".xml", '<!DOCTYPE topology SYSTEM "hwloc2.dtd">\n<topology/>', "lstopo"),
        # documents that quote the text they were made of
        (".yaml", "# " + PAIR, "YAML"),
        (".txt", "# GPU0 GPU1 CPU Affinity\nranks: 2\nlinks: []\n", "YAML"),
        (".xml", "ranks: 2", "XML"),
        ("", "", "YAML"),
    ],
)
def test_the_content_tells_the_reader(suffix: str, text: str, kind: str) -> None:
    assert kind_of(suffix, text) == kind


FOREIGN = {
    "rocminfo": "ROCk module is loaded\n=====================\nHSA System Attributes\n",
    "Slurm's topology, which synth order takes": "# topology.conf\nSwitchName=leaf1 Nodes=n[1-4]\n",
    "lstopo's text": "Machine (1008GB total)\n  Package L#0\n    NUMANode L#0 (P#0 504GB)\n",
    "nvidia-smi -q": "\n==============NVSMI LOG==============\n\nAttached GPUs : 8\nGPU 00000000:07:00.0\n",
    "nvidia-smi -q -x": "<nvidia_smi_log><gpu id='0'/></nvidia_smi_log>",
    "nvidia-smi -L": "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-1)\nGPU 1: NVIDIA A100 (UUID: GPU-2)\n",
    "nvidia-smi nvlink": "GPU 0: NVIDIA A100 (UUID: GPU-1)\n\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n",
    "nvidia-smi without topo -m": "| NVIDIA-SMI 550.54  Driver Version: 550.54   CUDA Version: 12.4 |\n",
    "npu-smi info -t topo (Ascend)": "\tNPU0   NPU1   CPU Affinity\nNPU0   X   HCCS   0-7\n",
    "hl-smi (Gaudi)": "modID   CPU Affinity    NUMA Affinity\n-----   ------------    -------------\n",
    "rocm-smi without --showtopo": "=== ROCm System Management Interface ===\nGPU  Temp\n0    29.0c\n",
    "ibnetdiscover": 'vendid=0x2c9\ndevid=0xb924\nSwitch\t36 "S-0002c902"\t\t# "switch"\n',
    "lspci": "-[0000:00]-+-00.0  Intel\n           +-01.0-[01]----00.0  NVIDIA\n",
    "graphviz": "digraph G {\n a -> b;\n}\n",
    "a file of MSCCL": '{"msccl_type": "topology", "name": "DGX1"}',
    "a schedule of MSCCL": '<algo name="a" proto="Simple"></algo>',
    "TACCL's": '{"name": "ndv2", "gpus_per_node": 8, "links": [[0, 1], [1, 0]]}',
    "TE-CCL's": '{"TopologyParams": {"name": "NDv2"}, "GurobiParams": {}}',
    "NCCL's graphs (NCCL_GRAPH_DUMP_FILE; its topology is NCCL_TOPO_DUMP_FILE)": "<graphs></graphs>",
    "NCCL's log (its topology is NCCL_TOPO_DUMP_FILE)": "node:1:1 [0] NCCL INFO Bootstrap : Using eth0\n",
    "ASTRA-sim's network": "topology: [ Ring ]\nnpus_count: [ 8 ]\nbandwidth: [ 50.0 ]\n",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("file", ["t.txt", "t.xml", "t.json", "t.yaml", "t"])
def test_what_no_reader_understands_is_named(tmp_path: Path, name: str, file: str) -> None:
    path = tmp_path / file
    path.write_text(FOREIGN[name])
    with pytest.raises(InputError) as caught:
        load(str(path))
    assert str(caught.value) == f"{path}: looks like {name}; understood are {UNDERSTOOD}"


@pytest.mark.parametrize(
    ("suffix", "text", "tool"),
    [
        ("yaml", PAIR, "nvidia-smi"),
        ("xml", PAIR, "nvidia-smi"),
        ("json", PAIR, "nvidia-smi"),
        ("yml", AMD, "rocm-smi"),
    ],
)
def test_text_of_a_tool_under_the_suffix_of_a_document_is_said(
    tmp_path: Path, suffix: str, text: str, tool: str
) -> None:
    path = tmp_path / f"t.{suffix}"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(str(path))
    kind = "YAML" if suffix == "yml" else suffix.upper()
    said = f"by its suffix {kind}, but it looks like what {tool} prints; call it .txt"
    assert str(caught.value) == f"{path}: {said}"


def test_own_files_with_mistakes_are_not_taken_for_foreign_ones(tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text(
        "# lspci: 01:00.0 GPU\nranks: 2\nlinks: [{between: [0, 5], bandwidth: 1}]\n"
    )
    with pytest.raises(InputError, match=r"between\[1\]: rank must be in 0..1"):
        load(str(tmp_path / "t.yaml"))
    (tmp_path / "t.json").write_text('{"format": "arborcast.schedule/1"}')
    with pytest.raises(InputError, match=r"must be a topology, got a file of format 'arborcast\.schedule/1'"):
        load(str(tmp_path / "t.json"))
