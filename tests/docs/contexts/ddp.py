import os

import torch
import torch.distributed as dist

os.environ |= {"ARBORCAST_TOPOLOGY": "full:2"}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1, bias=False))
# snippet
model(torch.full((1, 8), float(dist.get_rank()))).sum().backward()
assert torch.allclose(model.module.weight.grad, torch.full((1, 8), 0.5))  # the mean of 0 and 1
dist.barrier()
del model  # gloo's last reference must not be DDP's
dist.destroy_process_group()
