import torch
from torch import nn

from arborcast import pipeline, topologies

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
topology = topologies.load("full:2")
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
inputs, targets = torch.randn(64, 16), torch.randn(64, 16)
loss_fn = nn.functional.mse_loss


def optimizer(parameters):
    return torch.optim.Adam(parameters)


# snippet
assert float(loss) > 0
trainer.close()
torch.distributed.destroy_process_group()
