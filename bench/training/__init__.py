"""The questions of `bench/pipeline.py`, one module each."""
