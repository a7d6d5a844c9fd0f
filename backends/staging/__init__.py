"""Tensors that do not lie in host memory: how their pieces get there and back, and through how many buffers.

`device` says what the engine needs of a device, `emulated` and `cuda` are the two there are, `ring` chooses
pieces and depth. A program made for a ring (`lowering.lower.lower_rank` with a depth) says when each piece is
copied; `dataflow.run` begins the copies and goes on with what they bring when they have ended.
"""
