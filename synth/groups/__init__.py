"""Several groups of ranks at once on one fabric, its links shared as fairly as possible."""

from arborcast.synth.groups.fair_solver import solve_groups
from arborcast.synth.groups.mesh import along
from arborcast.synth.groups.result import GroupSchedule, GroupSchedules
from arborcast.synth.groups.shared_verifier import JointVerdict, verify_groups
from arborcast.synth.groups.sharing_certificate import JointCertificate, Level

__all__ = [
    "GroupSchedule",
    "GroupSchedules",
    "JointCertificate",
    "JointVerdict",
    "Level",
    "along",
    "solve_groups",
    "verify_groups",
]
