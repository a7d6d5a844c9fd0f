"""The allocations of a box: which of them differ, what NCCL would plan on each, and the figure of all."""
