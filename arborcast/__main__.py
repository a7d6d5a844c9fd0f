"""`python -m arborcast` is the command `synth`; `torchrun -m arborcast` starts it on every rank."""

from __future__ import annotations

from arborcast.synth.cli.app import main

if __name__ == "__main__":
    main()
