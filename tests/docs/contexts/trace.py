import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

os.environ |= {"ARBORCAST_TOPOLOGY": "full:2"}
dist.init_process_group("synth")
group, rank, gradients = dist.group.WORLD, dist.get_rank(), torch.ones(1024)
# snippet
assert json.loads(Path(f"trace-{rank}.json").read_text())
dist.barrier()
dist.destroy_process_group()
