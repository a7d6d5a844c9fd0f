"""`python -m synth`, which is what `torchrun -m synth` starts."""

from __future__ import annotations

from synth.cli import main

if __name__ == "__main__":
    main()
