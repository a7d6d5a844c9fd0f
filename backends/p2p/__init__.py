"""Programs by torch's grouped point-to-point messages, as NCCL and RCCL have them.

Lowered with `grouped=True`, a program's messages of one time are one group: started together, over when all
of them are (`lowering.groups` says what a rank does between them); `run.py` does it on tensors of any device.
`executors.torch_p2p.Executor` takes this way on NCCL, or where it is told to; a process group where
`ARBORCAST_P2P` says so, over what `carriers.py` has.
"""
