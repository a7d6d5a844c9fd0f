import torch
from torch import nn

from arborcast import pipeline

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
plan = pipeline.Plan([(0, 2, [0]), (2, 4, [1])], microbatches=4)
model = pipeline.Divisible([nn.Linear(8, 8) for _ in range(4)])
trainer = pipeline.Trainer(
    model, plan, nn.functional.mse_loss, lambda parameters: torch.optim.SGD(parameters, 0.1)
)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
loader = torch.utils.data.DataLoader(dataset, batch_size=16)
# snippet
assert set(state) == set(averaged) == set(model.state_dict())
assert position
trainer.close()
torch.distributed.destroy_process_group()
