"""Lowering of schedules to per-rank programs, and what runs them."""
