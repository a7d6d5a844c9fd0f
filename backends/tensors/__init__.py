"""What every executor does with tensors: checks before a call, torch's operators, what its stubs lack."""
