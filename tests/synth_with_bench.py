"""The `synth` command with `bench run`, also where it is not in it yet, for tests: a program of its own."""

from __future__ import annotations

import typer

from synth import cli
from synth.bench_run_command import bench_run


def mount() -> None:
    """Make `synth bench run` known."""
    if not any(group.name == "bench" for group in cli.app.registered_groups):
        bench = typer.Typer(name="bench")
        bench.callback()(lambda: None)
        bench.command("run")(bench_run)
        cli.app.add_typer(bench)


mount()

if __name__ == "__main__":
    cli.main()
