"""Questions asked of the numbers, one file each; the answers are JSON documents in `bench/results/`."""
