"""How much memory the ranks of a training take, beside what its plan says: a GPT-2 made on "meta".

Each rank gives only its own stage values. What is measured is the memory behind torch's tensors, at most,
from before the trainer is made until after some steps; and by how much the process's resident memory grew at
most, which also holds what gloo, the C library and kernels keep for themselves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborcast.bench.harness.processes import run_ranks

if TYPE_CHECKING:
    from arborcast.pipeline.model.traced import Traced
    from arborcast.pipeline.stages import Plan

STEPS = 3
"""From the second on the optimizer has its state."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained.

    Attributes:
        blocks: of the model.
        width: of its hidden states.
        words: of its vocabulary.
        tokens: of a sample.
        samples: of a microbatch.
        microbatches: of a step.
        ranks: one stage each.
        order: of passes.
        recompute: whether backward passes repeat forward passes.
    """

    blocks: int = 24
    width: int = 1024
    words: int = 50257
    tokens: int = 128
    samples: int = 1
    microbatches: int = 8
    ranks: int = 4
    order: str = "1f1b"
    recompute: bool = False

    @property
    def name(self) -> str:
        """Of the model."""
        return f"GPT-2, {self.blocks} blocks of {self.width}"

    def batch(self) -> dict[str, Any]:
        """Of a step."""
        import torch

        torch.manual_seed(0)
        words = torch.randint(0, self.words, (self.samples * self.microbatches, self.tokens))
        return {"input_ids": words, "labels": words, "use_cache": False}

    def model(self) -> Traced:
        """Without values."""
        import transformers

        from arborcast import pipeline

        transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
        config = transformers.GPT2Config(
            n_layer=self.blocks, n_embd=self.width, n_head=self.width // 64, vocab_size=self.words
        )
        with pipeline.on_meta():
            model = transformers.GPT2LMHeadModel(config)
        batch = self.batch()
        few = {name: it if isinstance(it, bool) else it[:2] for name, it in batch.items()}
        return pipeline.trace(model, few)

    def plan(self, traced: Traced) -> tuple[Plan, list[Any]]:
        """Stages of about equal times, and what each needs."""
        from arborcast.pipeline.costs.analytic import analyse
        from arborcast.pipeline.costs.devices import device_named
        from arborcast.pipeline.planning.memory_need import stage_memory
        from arborcast.pipeline.planning.stage_balance import balanced
        from arborcast.pipeline.stages import Plan

        batch = self.batch()
        few = {name: it if isinstance(it, bool) else it[:2] for name, it in batch.items()}
        profile = analyse(traced, few, device_named("v100"), optimizer=_adam)
        times = [it.forward_us + it.backward_us for it in profile.layers]
        stages = [(start, end, [rank]) for rank, (start, end) in enumerate(balanced(times, self.ranks))]
        plan = Plan(stages, self.microbatches, self.order, self.recompute, model=traced.name)
        size = self.samples * self.microbatches
        return plan, [stage_memory(plan, profile, batch=size, stage=it) for it in range(self.ranks)]


SETTINGS = (Setting(), Setting(order="gpipe", width=512, recompute=True), Setting(order="gpipe", width=512))
SMALL = (Setting(blocks=8, width=128, words=5000),)


def _adam(parameters: Any) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=1e-4)


def memory_rows(setting: Setting) -> list[dict[str, Any]]:
    """A row for each rank."""
    plan, memories = setting.plan(setting.model())
    found = run_ranks(setting.ranks, _train, setting, plan, timeout_s=3600)
    return [
        {
            "model": setting.name,
            "order": f"{setting.order}, recompute" if setting.recompute else setting.order,
            "stage": stage,
            "layers": plan.stages[stage].end - plan.stages[stage].start,
            "predicted_bytes": memory.total,
            "live_bytes": live,
            "resident_bytes": resident,
            "ratio": live / memory.total,
            **{f"{name}_bytes": size for name, size in asdict(memory).items()},
        }
        for stage, (memory, (live, resident)) in enumerate(zip(memories, found, strict=True))
    ]


def _train(rank: int, setting: Setting, plan: Plan) -> tuple[int, int]:
    import torch
    import torch._dynamo  # with the first optimizer otherwise, after resident memory was read

    from arborcast import pipeline
    from arborcast.pipeline.costs.live import LiveBytes

    torch.set_num_threads(1)
    layered, batch = setting.model(), setting.batch()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark begins anew
    before = _resident("VmRSS")
    with LiveBytes() as live:
        trainer = pipeline.Trainer(
            layered, plan, None, _adam, collectives="gloo", check_loss=False, timeout_s=600
        )
        for _ in range(STEPS):
            trainer.step(batch)
    after = _resident("VmHWM")
    trainer.close()
    return live.peak, after - before


def _resident(what: str) -> int:
    """Bytes of resident memory: `VmRSS` now, `VmHWM` at most."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(it.split()[1]) << 10 for it in lines if it.startswith(what))
