import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

os.environ |= {"ARBORCAST_TOPOLOGY": "dgx1", "ARBORCAST_RANKS": "4,5,6,7"}
dist.init_process_group("synth")


def step():
    tensor = torch.ones(1024)
    dist.all_reduce(tensor)
    assert tensor.eq(4).all()


# snippet
assert json.loads(Path(f"step-{dist.get_rank()}.json").read_text())
step()
dist.barrier()
dist.destroy_process_group()
