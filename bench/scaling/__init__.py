"""Parts of `bench/scale.py`: its cases, and the processes that answer them."""
