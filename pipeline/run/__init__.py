"""One step of training on one rank: what it sends and computes when, and what its gradients go through."""
