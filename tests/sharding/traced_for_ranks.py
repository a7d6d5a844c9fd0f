"""Only the parent of ranks imports this (`RANKS_IMPORT`): what each of them would trace or import anew.

A trace takes a second or two of a processor. The parent computes on one thread, so that it may be forked.
"""

import torch
import torch._dynamo
import torch.distributed.tensor
import torch.distributed.tensor.debug
import torch.export._trace

import arborcast.pipeline.run.intra.divided_model
import arborcast.pipeline.trainer  # noqa: F401
from tests.sharding.trained import traced

torch.set_num_threads(1)
for name, layers, evaluation in (
    ("two layers", None, False),
    ("mlp", 2, False),
    ("tied", 2, False),
    ("tied", 2, True),
    ("gpt", 2, False),
):
    traced(name, layers, evaluation=evaluation)
