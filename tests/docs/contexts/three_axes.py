import torch
from torch import nn

from arborcast import pipeline

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
loss_fn = nn.functional.mse_loss


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs):
        return self.down(torch.relu(self.up(inputs)))


model = pipeline.Divisible([Layer() for _ in range(4)])
# snippet
trainer.step(torch.randn(16, 8), torch.randn(16, 8))
trainer.close()
torch.distributed.destroy_process_group()
