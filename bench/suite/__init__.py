"""Torch's own tests of process groups, run on any backend: `bench/torch_suite.py` is the command.

`cases` imports the tests that ship with torch as one configuration wants them, `forked` runs one of them on a
process per rank, `gpu_on_cpu` lets those that want GPUs work on CPU tensors, and `compiled` has the forms of
`torch.compile` that torch's own tests do not reach.
"""
