"""Which reader a file is for, by its content; and what a file seems to be that none understands."""

from __future__ import annotations

import re

UNDERSTOOD = (
    "YAML or JSON with ranks and links or of InfraGraph, nvidia-smi topo -m, rocm-smi --showtopo, "
    "amd-smi topology, NCCL's or lstopo's XML"
)

_OURS = re.compile(r"^(?:ranks|links|switches|format)\s*:", re.MULTILINE)
_MATRIX = re.compile(
    r"GPU[0-9]{1,3}(?:[^A-Za-z0-9\n]{0,40}GPU[0-9]|[^A-Za-z0-9\n]{1,40}(?:X|CPU Affinity)\b)"
)
_ROCM = re.compile(
    r"(?:[Ww]eight|[Hh]ops|[Ll]ink [Tt]ype|bandwidth) [Bb]etween [Tt]wo GPUs|^[ \t]*=+ *Bandwidth *=+[ \t]*$"
    r"|(?:WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE|\(Topology\) (?:Link type|Hops|Weight) between DRM devices"
    r"|^gpu,(?:bdf,)?.*_gpu_0\b",
    re.MULTILINE,
)
_HWLOC = re.compile(
    r"\s*(?:<\?xml[^>]{0,99}>\s*)?(?:<!--(?:(?!-->).){0,999}-->\s*){0,9}(?:<!DOCTYPE topology|<topology\b)",
    re.DOTALL,
)
_AMD_JSON = re.compile(r'"bdf"\s*:.{0,200}?"links"\s*:\s*\[', re.DOTALL)


def is_json(text: str) -> bool:
    """Whether a text begins as JSON does; prompts begin with "[" as well."""
    return re.match(r"\s*(?:\{|\[\s*[{\]])", text) is not None


def kind_of(suffix: str, text: str) -> str:
    """YAML, JSON, XML, lstopo, nvidia-smi or rocm-smi: what a file holds.

    The suffix is in lower case, with its dot. Those of documents decide, since these may quote a tool's text
    in comments; otherwise the content.
    """
    if suffix in {".yaml", ".yml"}:
        return "YAML"
    if _HWLOC.match(text):
        return "lstopo"
    if suffix == ".xml":
        return "XML"
    start = text.lstrip()[:1]
    by_rocm = _ROCM.search(text) is not None
    if suffix == ".json" or is_json(text):
        return "rocm-smi" if by_rocm or _AMD_JSON.search(text) else "JSON"
    signs = {
        "YAML": _OURS.search(text) is not None,
        "XML": start == "<" and "<system" in text,
        "rocm-smi": by_rocm,
        "nvidia-smi": _MATRIX.search(text) is not None,  # forums fold text in HTML, which begins with "<"
    }
    return next((kind for kind, sign in signs.items() if sign), "XML" if start == "<" else "YAML")


_OTHERS = {
    "NCCL's graphs (NCCL_GRAPH_DUMP_FILE; its topology is NCCL_TOPO_DUMP_FILE)": r"<graphs\b",
    "a schedule of MSCCL": r"<algo\b",
    "Slurm's topology, which synth order takes": r"^[ \t]*(?:SwitchName|BlockName)=",
    "nvidia-smi -q -x": r"<nvidia_smi_log\b",
    "GraphML": r"<graphml\b",
    "a web page": r"<(?:!DOCTYPE )?html\b",
    "NCCL's log (its topology is NCCL_TOPO_DUMP_FILE)": r"NCCL INFO ",
    "npu-smi info -t topo (Ascend)": r"\bNPU0\s+NPU1\b|\bHCCS\b",
    "hl-smi (Gaudi)": r"\bHL-SMI\b|\bmodID\s+CPU Affinity",
    "xpu-smi (Intel)": r"\bGPU 0/0\b|\bxpu-smi\b",
    "rocminfo": r"\bHSA System Attributes\b|^ROCk module\b",
    "rocm-smi without --showtopo": r"ROCm System Management Interface|ROCM-SMI",
    "amd-smi without topology": r"\bAMDSMI|\bAMD-SMI\b|^GPU: [0-9]{1,3}\s{1,99}ASIC:",
    "nvidia-smi -q": r"=NVSMI LOG=",
    "nvidia-smi nvlink": r"^[ \t]*Link [0-9]+: ",
    "nvidia-smi -L": r"^GPU [0-9]+: .*\(UUID: ",
    "nvidia-smi without topo -m": r"\bNVIDIA-SMI\b",
    "the p2pBandwidthLatencyTest of CUDA": r"P2P=(?:Dis|En)abled|P2P Connectivity Matrix",
    "a run of nccl-tests": r"^# nThread|out-of-place",
    "lstopo's text": r"^[ \t]*(?:Machine \(|NUMANode L#|Package L#|HostBridge L#)",
    "ibnetdiscover": r'^(?:Switch|Ca)\s+[0-9]+\s+"[SH]-|^vendid=0x',
    "lspci": r"^[ \t]*-\[[0-9a-f]{4}:|^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \w",
    "numactl -H": r"^available: [0-9]+ nodes",
    "graphviz": r"^[ \t]*(?:strict[ \t]+)?(?:di)?graph\b[^:\n]{0,99}\{",
    "a file of MSCCL": r'"msccl_type"',
    "TE-CCL's": r'"(?:TopologyParams|InstanceParams)"',
    "TACCL's": r'"(?:gpus_per_node|invbws|node_invbws|symmetry_offsets|intranode_sketch)"',
    "ASTRA-sim's network": r'\bnpus_count"?\s*:|"physical-topology"',
}


def seems(text: str) -> str | None:
    """What a text seems to be that is for no reader here; None where that cannot be said."""
    beginning = text[: 1 << 20]
    if (
        _OURS.search(beginning) or '"ranks"' in beginning or "<system" in beginning
    ):  # it has a mistake instead
        return None
    return next((name for name, sign in _OTHERS.items() if re.search(sign, beginning, re.MULTILINE)), None)
