"""One step of training on one rank: what it sends and computes when, and what its gradients go through.

`Trainer` checks what it is told (`training_options`) and makes this rank's part of the model
(`local_model`). In a step all ranks come to know the batch (`batch_negotiation`); then `executor` works out
once for each shape of batches what crosses the boundaries (`boundary`) and lets `loop` receive, compute and
send (`stage_messages`), with `losses` on the last stage. `update` sums the gradients (`gradients`, `ties`),
scales and clips them (`precision`, `clipping`) and lets the optimizer step. Whoever cannot go on says so to
all (`failures`). `checkpoints` write and read what a training goes on from. A stage is a module, or divided
operators (`intra`). `devices` knows where passes run; nobody but `stage_messages`, `activation_treatment` and
`stage_groups` does otherwise on a GPU than on the host.
"""
