"""Exported modules under JAX, on host devices, in a process of its own: JAX' threads and forks do not mix.

`python -m tests.support.jax_child FOLDER` runs every `NAME.py` there beside what JAX has itself, as
`cases.json` says. What came out is in `NAME.npz` then, what JAX lowers in `NAME.mlir` and `NAME.hlo`.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def main(folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.sharding import Mesh, PartitionSpec

    jax.config.update("jax_num_cpu_devices", 8)

    def own(kind: str, root: int) -> Callable[[Any], Any]:
        """What JAX has for a kind."""
        me = lambda: lax.axis_index("ranks")  # noqa: E731
        return {
            "broadcast": lambda x: lax.all_gather(x, "ranks")[root],
            "reduce": lambda x: jnp.where(me() == root, lax.psum(x, "ranks"), 0),
            "allgather": lambda x: lax.all_gather(x, "ranks"),
            "reduce_scatter": lambda x: lax.psum_scatter(x, "ranks"),
            "allreduce": lambda x: lax.psum(x, "ranks"),
            "gather": lambda x: jnp.where(me() == root, lax.all_gather(x, "ranks"), 0),
            "scatter": lambda x: lax.all_gather(x, "ranks")[root][me()],
            "alltoall": lambda x: lax.all_to_all(x, "ranks", 0, 0),
        }[kind]

    def over_ranks(function: Callable[[Any], Any], ranks: int) -> Any:
        mesh = Mesh(np.array(jax.devices()[:ranks]), ("ranks",))
        spec = PartitionSpec("ranks")
        return jax.jit(
            jax.shard_map(lambda x: function(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
        )

    for name, case in json.loads((folder / "cases.json").read_text()).items():
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        ours = over_ranks(lambda x, m=module, k=case["kind"]: getattr(m, k)(x, "ranks"), module.RANKS)
        theirs = over_ranks(own(case["kind"], case["root"]), module.RANKS)
        lead = [module.RANKS, *case["lead"]]
        found = {}
        for dtype in ("float32", "bfloat16"):
            shape = (*lead, 3, 7)  # no multiple of what blocks are cut into
            x = jnp.arange(np.prod(shape)).reshape(shape) % 13 - 6
            found[dtype] = ours(x.astype(dtype)).astype("float32")
            found[f"{dtype} own"] = theirs(x.astype(dtype)).astype("float32")
        x = x.astype("float32")
        for which, function in (("", ours), (" own", theirs)):
            result, back = jax.vjp(function, x)
            wanted = jnp.arange(result.size).reshape(result.shape) % 11 - 5
            (found[f"gradient{which}"],) = back(wanted.astype("float32"))
        np.savez(folder / f"{name}.npz", **found)
        lowered = ours.lower(jax.ShapeDtypeStruct((*lead, module.UNITS), "float32"))
        (folder / f"{name}.mlir").write_text(lowered.as_text())
        (folder / f"{name}.hlo").write_text(lowered.compile().as_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
