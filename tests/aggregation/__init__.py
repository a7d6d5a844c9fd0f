"""Switches that execute programs, on real processes."""
