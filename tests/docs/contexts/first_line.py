import os

import torch
import torch.distributed as dist

os.environ |= {"ARBORCAST_TOPOLOGY": "full:2"}
# snippet
tensor = torch.ones(1024)
dist.all_reduce(tensor)
assert tensor.eq(2).all()
assert dist.get_backend() == "synth"
dist.destroy_process_group()
