"""Simulated clusters: machines at the rates NCCL plans with, candidates, what overhead costs, the figure."""
