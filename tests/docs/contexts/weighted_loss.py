import torch
from torch import nn

# snippet
output, targets = torch.randn(4, 5, 3), torch.randint(3, (4, 5))
targets[0, :2] = -100
loss, weight = loss_fn(output, targets)
expected = nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-100)
assert torch.allclose(loss / weight, expected)
