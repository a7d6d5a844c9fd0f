"""Models as their libraries give them: cut in two and in four, trained in parts as in one piece, or refused.

Every model is built from a small configuration, without weights of others. What is random in training is
switched off, since stages draw other random numbers than serial training; nothing else is changed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from arborcast.pipeline.model.traced import Traced

LIMIT = 1e-6
"""Of losses and weights, absolute or relative, whichever is the larger."""
SAMPLES, TOKENS, WORDS = 5, 8, 41
SHARES = ((0, 3), (3, 5))
"""Two microbatches, of unlike samples and tokens that count."""


@dataclass(frozen=True)
class UserModel:
    """A model as a user brings it.

    Attributes:
        name: library and class.
        make: the model.
        batch: its inputs, with labels where it returns its loss.
        loss_fn: of a model that returns none, with targets made by `targets`.
        targets: of a batch.
        normalises: whether it has batch norm, so that only a batch in one piece is serial.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss_fn: Callable[..., Any] | None = None
    targets: Callable[[], Any] | None = None
    normalises: bool = False


def catalog() -> list[UserModel]:
    """All of them whose library is there."""
    return [*_causal(), *_encoders(), *_both(), *_seeing(), *_hearing(), *_torchvision(), *_timm(), *_own()]


# ---------------------------------------------------------------------- transformers

SMALL = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = SMALL | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
CAUSAL: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32}),
    (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "max_position_embeddings": 32,
        },
    ),
    ("GPTNeoXConfig", "GPTNeoXForCausalLM", DECODER),
    (
        "GPTJConfig",
        "GPTJForCausalLM",
        {"n_embd": 16, "n_layer": 4, "n_head": 2, "rotary_dim": 4, "n_positions": 32},
    ),
    ("OPTConfig", "OPTForCausalLM", DECODER | {"ffn_dim": 24, "word_embed_proj_dim": 16}),
    ("BloomConfig", "BloomForCausalLM", {"hidden_size": 16, "n_layer": 4, "n_head": 2}),
    ("FalconConfig", "FalconForCausalLM", DECODER),
    ("MptConfig", "MptForCausalLM", {"d_model": 16, "n_layers": 4, "n_heads": 2, "max_seq_len": 32}),
    ("LlamaConfig", "LlamaForCausalLM", DECODER | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("MistralConfig", "MistralForCausalLM", DECODER | {"num_key_value_heads": 1, "sliding_window": 4}),
    ("MixtralConfig", "MixtralForCausalLM", DECODER | {"num_key_value_heads": 1, "num_local_experts": 4}),
    ("Qwen2Config", "Qwen2ForCausalLM", DECODER | {"num_key_value_heads": 1}),
    ("Qwen3Config", "Qwen3ForCausalLM", DECODER | {"num_key_value_heads": 1, "head_dim": 8}),
    ("GemmaConfig", "GemmaForCausalLM", DECODER | {"num_key_value_heads": 1, "head_dim": 8}),
    ("Gemma2Config", "Gemma2ForCausalLM", DECODER | {"num_key_value_heads": 1, "head_dim": 8}),
    ("PhiConfig", "PhiForCausalLM", DECODER),
    ("Phi3Config", "Phi3ForCausalLM", DECODER | {"num_key_value_heads": 1}),
    ("StableLmConfig", "StableLmForCausalLM", DECODER | {"num_key_value_heads": 1}),
    ("OlmoConfig", "OlmoForCausalLM", DECODER),
    ("CohereConfig", "CohereForCausalLM", DECODER),
    ("Starcoder2Config", "Starcoder2ForCausalLM", DECODER | {"num_key_value_heads": 1}),
    ("MambaConfig", "MambaForCausalLM", {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 4}),
)
BERT = DECODER | {"type_vocab_size": 2}
ENCODERS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("BertConfig", "BertForMaskedLM", "tokens", BERT),
    ("BertConfig", "BertForPreTraining", "pretraining", BERT),
    ("BertConfig", "BertForSequenceClassification", "sequence", BERT | {"num_labels": 3}),
    ("BertConfig", "BertForTokenClassification", "tokens", BERT | {"num_labels": WORDS}),
    ("BertConfig", "BertForQuestionAnswering", "span", BERT),
    ("BertConfig", "BertForMultipleChoice", "choice", BERT),
    ("RobertaConfig", "RobertaForMaskedLM", "tokens", BERT | {"max_position_embeddings": 40}),
    (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        "tokens",
        {"dim": 16, "hidden_dim": 24, "n_layers": 4, "n_heads": 2, "max_position_embeddings": 32},
    ),
    ("AlbertConfig", "AlbertForMaskedLM", "tokens", BERT | {"embedding_size": 8}),
    ("ElectraConfig", "ElectraForPreTraining", "tokens01", BERT | {"embedding_size": 8}),
    (
        "DebertaV2Config",
        "DebertaV2ForMaskedLM",
        "tokens",
        BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    ("ModernBertConfig", "ModernBertForMaskedLM", "tokens", DECODER | {"cls_token_id": 1, "sep_token_id": 2}),
    ("MPNetConfig", "MPNetForMaskedLM", "tokens", BERT | {"max_position_embeddings": 40}),
    ("LlamaConfig", "LlamaForSequenceClassification", "sequence", DECODER | {"num_labels": 3}),
    (
        "GPT2Config",
        "GPT2ForTokenClassification",
        "tokens",
        {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 32, "num_labels": WORDS},
    ),
    ("FNetConfig", "FNetForMaskedLM", "unmasked", BERT),
)
STACKS = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
BOTH: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("T5Config", "T5ForConditionalGeneration", T5),
    ("MT5Config", "MT5ForConditionalGeneration", T5),
    ("BartConfig", "BartForConditionalGeneration", STACKS),
    ("PegasusConfig", "PegasusForConditionalGeneration", STACKS),
    ("MarianConfig", "MarianMTModel", STACKS),
    ("MBartConfig", "MBartForConditionalGeneration", STACKS),
)
VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 3,
}
SEEING: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViTConfig", "ViTForImageClassification", VIT),
    ("DeiTConfig", "DeiTForImageClassification", VIT),
    ("BeitConfig", "BeitForImageClassification", VIT),
    ("Dinov2Config", "Dinov2ForImageClassification", VIT),
    (
        "SwinConfig",
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "window_size": 4,
            "num_labels": 3,
        },
    ),
    (
        "ConvNextConfig",
        "ConvNextForImageClassification",
        {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1], "num_labels": 3},
    ),
    (
        "ResNetConfig",
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
            "num_labels": 3,
        },
    ),
    (
        "SegformerConfig",
        "SegformerForImageClassification",
        {
            "hidden_sizes": [4, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "num_labels": 3,
        },
    ),
)


def _causal() -> Iterator[UserModel]:
    for config, name, options in CAUSAL:
        yield UserModel(f"transformers {name}", _built(config, name, SMALL | options), _words)


def _encoders() -> Iterator[UserModel]:
    for config, name, task, options in ENCODERS:
        yield UserModel(f"transformers {name}", _built(config, name, SMALL | options), BATCHES[task])


def _both() -> Iterator[UserModel]:
    for config, name, options in BOTH:
        yield UserModel(f"transformers {name}", _built(config, name, SMALL | options), _words)


def _seeing() -> Iterator[UserModel]:
    for config, name, options in SEEING:
        size = options.get("image_size", 32)
        yield UserModel(
            f"transformers {name}",
            _built(config, name, options),
            _images_and_labels(size),
            normalises=name == "ResNetForImageClassification",
        )
    clip = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    yield UserModel(
        "transformers CLIPModel, contrastive loss",
        _built(
            "CLIPConfig",
            "CLIPModel",
            {
                "text_config": SMALL | clip | {"max_position_embeddings": 32},
                "vision_config": clip | {"image_size": 16, "patch_size": 8},
                "projection_dim": 8,
            },
        ),
        lambda: _words(labels=False) | {"pixel_values": _images(16)(), "return_loss": True},
    )


def _hearing() -> Iterator[UserModel]:
    whisper = STACKS | {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}

    def sound() -> Any:
        import torch

        return torch.randn(SAMPLES, 8, 16)

    def encoder() -> nn.Module:
        return _built("WhisperConfig", "WhisperModel", SMALL | whisper)().encoder

    yield UserModel(
        "transformers WhisperForConditionalGeneration",
        _built("WhisperConfig", "WhisperForConditionalGeneration", SMALL | whisper),
        lambda: {"input_features": sound(), "labels": _words()["labels"]},
    )
    yield UserModel(
        "transformers WhisperEncoder, loss of a dict's entry",
        encoder,
        lambda: {"input_features": sound()},
        loss_fn=lambda output, target: (output.last_hidden_state.mean(1) - target).square().mean(),
        targets=lambda: _normal(SAMPLES, 16),
    )
    yield UserModel(
        "transformers Wav2Vec2ForSequenceClassification",
        _built(
            "Wav2Vec2Config",
            "Wav2Vec2ForSequenceClassification",
            {
                "hidden_size": 16,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "intermediate_size": 24,
                "conv_dim": (8, 8),
                "conv_stride": (4, 4),
                "conv_kernel": (8, 4),
                "num_labels": 3,
                "num_conv_pos_embeddings": 4,
                "num_conv_pos_embedding_groups": 2,
                "classifier_proj_size": 8,
            },
        ),
        lambda: {"input_values": _normal(SAMPLES, 256), "labels": _classes()},
    )


def _built(config: str, name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        library = importlib.import_module("transformers")
        model: nn.Module = getattr(library, name)(getattr(library, config)(**options))
        return model

    return build


def _words(*, labels: bool = True) -> dict[str, Any]:
    """Sentences of unlike lengths, padded."""
    import torch

    words = torch.randint(3, WORDS, (SAMPLES, TOKENS))
    mask = torch.ones(SAMPLES, TOKENS, dtype=torch.long)
    for sample, length in enumerate((8, 5, 7, 3, 6)):
        mask[sample, length:] = 0
    given = {"input_ids": words * mask, "attention_mask": mask}
    return given | ({"labels": torch.where(mask > 0, words, -100)} if labels else {})


def _classes() -> Tensor:
    import torch

    return torch.randint(0, 3, (SAMPLES,))


def _normal(*shape: int) -> Tensor:
    import torch

    return torch.randn(*shape)


def _choices() -> dict[str, Any]:
    import torch

    words = torch.randint(3, WORDS, (SAMPLES, 2, TOKENS))
    return {"input_ids": words, "labels": torch.randint(0, 2, (SAMPLES,))}


def _spans() -> dict[str, Any]:
    import torch

    places = {name: torch.randint(0, TOKENS, (SAMPLES,)) for name in ("start_positions", "end_positions")}
    return _words(labels=False) | places


BATCHES: dict[str, Callable[[], Any]] = {
    "tokens": _words,
    "unmasked": lambda: {name: value for name, value in _words().items() if name != "attention_mask"},
    "tokens01": lambda: _words() | {"labels": _words()["attention_mask"]},
    "pretraining": lambda: _words() | {"next_sentence_label": _classes() % 2},
    "sequence": lambda: _words() | {"labels": _classes()},
    "span": _spans,
    "choice": _choices,
}


def _images(size: int, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: _normal(SAMPLES, channels, size, size)


def _images_and_labels(size: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": _images(size)(), "labels": _classes()}


# ---------------------------------------------------------------------- vision libraries

TORCHVISION: tuple[tuple[str, int, bool, dict[str, Any]], ...] = (
    ("resnet18", 32, True, {}),
    ("alexnet", 64, False, {"dropout": 0.0}),
    ("squeezenet1_1", 32, False, {"dropout": 0.0}),
    ("densenet121", 32, True, {}),
    ("mobilenet_v3_small", 32, True, {"dropout": 0.0}),
    ("efficientnet_b0", 32, True, {"stochastic_depth_prob": 0.0, "dropout": 0.0}),
    ("shufflenet_v2_x0_5", 32, True, {}),
    ("googlenet", 64, True, {"aux_logits": False, "init_weights": False, "dropout": 0.0}),
    ("convnext_tiny", 32, False, {"stochastic_depth_prob": 0.0}),
    ("swin_t", 32, False, {"stochastic_depth_prob": 0.0}),
)
TIMM: tuple[tuple[str, int, bool, dict[str, Any]], ...] = (
    ("vit_tiny_patch16_224", 32, False, {"img_size": 32, "depth": 4}),
    ("deit_tiny_distilled_patch16_224", 32, False, {"img_size": 32, "depth": 4}),
    ("mixer_s16_224", 32, False, {"img_size": 32, "num_blocks": 4}),
    ("resnet10t", 32, True, {}),
    ("convnext_atto", 32, False, {}),
    ("mobilenetv3_small_050", 32, True, {}),
    ("regnetx_002", 32, True, {}),
    ("gmlp_s16_224", 32, False, {"img_size": 32, "num_blocks": 4}),
    (
        "swin_tiny_patch4_window7_224",
        32,
        False,
        {
            "img_size": 32,
            "window_size": 4,
            "embed_dim": 12,
            "depths": (1, 1, 2, 1),
            "num_heads": (1, 2, 4, 4),
        },
    ),
)


def _torchvision() -> Iterator[UserModel]:
    if not _has_vision("torchvision"):
        return
    from torch.nn.functional import cross_entropy

    for name, size, normalises, options in TORCHVISION:
        yield UserModel(
            f"torchvision {name}",
            lambda name=name, options=options: _vision("torchvision.models", name)(num_classes=3, **options),
            _images(size),
            cross_entropy,
            _classes,
            normalises,
        )
    yield UserModel(
        "torchvision fcn_resnet50, loss of a dict's entries",
        lambda: _vision("torchvision.models.segmentation", "fcn_resnet50")(
            num_classes=3, weights_backbone=None, aux_loss=True
        ),
        _images(32),
        lambda output, target: (
            cross_entropy(output["out"], target) + 0.5 * cross_entropy(output["aux"], target)
        ),
        lambda: _pixels(32),
        normalises=True,
    )


def _timm() -> Iterator[UserModel]:
    if not _has_vision("timm"):
        return
    from torch.nn.functional import cross_entropy

    for name, size, normalises, options in TIMM:
        yield UserModel(
            f"timm {name}",
            lambda name=name, options=options: _vision("timm", "create_model")(
                name, num_classes=3, **options
            ),
            _images(size),
            _of_either(cross_entropy),
            _classes,
            normalises,
        )


def _of_either(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A distilled model gives two answers in training."""
    return lambda output, target: (
        sum(loss(it, target) for it in output) if isinstance(output, tuple) else loss(output, target)
    )


def _has_vision(library: str) -> bool:
    """Whether a library is there; torchvision's operators, of which no model here needs one, need not load.

    Its packages on PyPI are built for CUDA. Beside a torch for CPUs its import fails for want of two
    declarations, which are made here.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None or importlib.util.find_spec(library) is None:
        return False
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for name in ("nms", "qnms"):
            torch.library.define(
                f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return True


def _vision(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _pixels(size: int) -> Tensor:
    import torch

    return torch.randint(0, 3, (SAMPLES, size, size))


# ---------------------------------------------------------------------- in-house models


def _own() -> Iterator[UserModel]:
    from arborcast.bench.training import own_models as own

    yield UserModel(
        "U-Net with skips", own.UNet, _images(16, 2), own.squared, lambda: _normal(SAMPLES, 2, 16, 16)
    )
    yield UserModel(
        "mixture of experts",
        own.Experts,
        lambda: _normal(SAMPLES, TOKENS, 8),
        own.squared,
        lambda: _normal(SAMPLES, TOKENS, 8),
    )
    yield UserModel(
        "mixture of experts, load-balancing loss",
        lambda: own.Experts(balanced=True),
        lambda: {"x": _normal(SAMPLES, TOKENS, 8), "target": _normal(SAMPLES, TOKENS, 8)},
    )
    yield UserModel(
        "control flow on shapes",
        own.Shaped,
        lambda: _normal(SAMPLES, 12, 8),
        own.squared,
        lambda: _normal(SAMPLES, 8),
    )
    yield UserModel(
        "control flow on values",
        own.Choosing,
        lambda: _normal(SAMPLES, 8),
        own.squared,
        lambda: _normal(SAMPLES, 8),
    )
    yield UserModel(
        "dataclass out, optional input",
        own.Named,
        lambda: {"x": _normal(SAMPLES, 8), "scale": 0.5},
        lambda output, target: own.squared(output.y, target),
        lambda: _normal(SAMPLES, 8),
    )
    yield UserModel(
        "several losses with weights of classes",
        own.SeveralLosses,
        lambda: {"x": _normal(SAMPLES, 8), "kinds": _classes(), "values": _normal(SAMPLES)},
    )
    yield UserModel(
        "masked mean by hand",
        own.Masked,
        lambda: {
            "x": _normal(SAMPLES, TOKENS, 8),
            "target": _normal(SAMPLES, TOKENS, 8),
            "mask": _words()["attention_mask"],
        },
    )
    yield UserModel(
        "LSTM", own.Recurrent, lambda: _normal(SAMPLES, 6, 8), own.squared, lambda: _normal(SAMPLES, 8)
    )


# ---------------------------------------------------------------------- the question


def examine(model: UserModel, *, steps: int = 20, stages: Sequence[int] = (2, 4)) -> Iterator[dict[str, Any]]:
    """A row for each number of stages: the largest differences from serial training, or why it is refused."""
    import torch

    from arborcast.pipeline.errors import PartitionError
    from arborcast.pipeline.model.traced import trace

    torch.manual_seed(0)
    built = deterministic(model.make())
    try:
        traced = trace(built, model.batch(), layers=max(stages))
    except PartitionError as error:
        for count in stages:
            yield {"model": model.name, "stages": count, "result": "refused", "reason": str(error)}
        return
    state = {name: value.clone() for name, value in built.state_dict().items()}
    expected, evaluated, weights = serial(model, built, steps)
    for count in stages:
        built.load_state_dict(state)
        losses, last = staged(model, traced, count, steps)
        differences = {
            "loss_difference": max(map(_difference, losses, expected)),
            "weight_difference": max(
                _difference(value, weights[name]) for name, value in built.state_dict().items()
            ),
            "evaluation_difference": None if last is None else _difference(last, evaluated),
        }
        equal = (
            max(
                differences["loss_difference"],
                differences["weight_difference"],
                differences["evaluation_difference"] or 0.0,
            )
            <= LIMIT
        )
        yield {
            "model": model.name,
            "stages": count,
            "result": "equal" if equal else "differs",
            "microbatches": 1 if model.normalises else len(SHARES),
            "own_loss": bool(traced.losses),
            "operators": len(traced.training.placed),
            "legal_cuts": sum(not cut.fault for cut in traced.training.cuts),
            "reason": traced.evaluation if isinstance(traced.evaluation, str) else "",
            **differences,
        }


def deterministic(model: nn.Module) -> nn.Module:
    """The model without dropout and the like."""
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in vars(holder).items() if holder is not None else ():
                is_share = isinstance(value, float) and 0 < value < 1
                if is_share and ("drop" in name or name in {"p", "mask_time_prob"}):
                    setattr(holder, name, 0.0)
    return model.train()


def _optimizer(model: nn.Module) -> Any:
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _batches(model: UserModel, steps: int) -> Iterator[tuple[Any, Any]]:
    import torch

    for step in range(steps):
        torch.manual_seed(1 + step)
        yield model.batch(), model.targets() if model.targets is not None else None


def serial(model: UserModel, built: nn.Module, steps: int) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Losses of all steps, that of the first batch in evaluation afterwards, and the weights."""
    import torch

    def loss_of(inputs: Any, targets: Any) -> Tensor:
        output = built(**inputs) if isinstance(inputs, dict) else built(inputs)
        if model.loss_fn is not None:
            loss: Tensor = model.loss_fn(output, targets)
            return loss
        return output if isinstance(output, torch.Tensor) else output["loss"]

    optimizer, losses = _optimizer(built), []
    for inputs, targets in _batches(model, steps):
        optimizer.zero_grad()
        loss = loss_of(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        evaluated = loss_of(*next(_batches(built_eval(built, model), 1)))
    weights = {name: value.clone() for name, value in built.train().state_dict().items()}
    return losses, evaluated, weights


def built_eval(built: nn.Module, model: UserModel) -> UserModel:
    """In evaluation from now on."""
    built.eval()
    return model


def staged(model: UserModel, traced: Traced, count: int, steps: int) -> tuple[list[Tensor], Tensor | None]:
    """The same in stages, one after another in this process; no evaluation where it cannot be."""
    import torch

    bounds = [traced.depth * stage // count for stage in range(count + 1)]
    stages = [traced.divide(start, end) for start, end in pairwise(bounds)]
    optimizer, losses = _optimizer(traced.divide(0, traced.depth)), []
    shares = ((0, SAMPLES),) if model.normalises else SHARES
    for inputs, targets in _batches(model, steps):
        optimizer.zero_grad()
        losses.append(_step(model, traced, stages, shares, inputs, targets))
        optimizer.step()
    if isinstance(traced.evaluation, str):
        return losses, None
    for stage in stages:
        stage.eval()
    with torch.no_grad():
        inputs, targets = next(_batches(model, 1))
        return losses, _step(model, traced, stages, shares, inputs, targets)


def _step(
    model: UserModel,
    traced: Traced,
    stages: Sequence[Any],
    shares: Sequence[tuple[int, int]],
    inputs: Any,
    targets: Any,
) -> Tensor:
    """The loss of a batch; gradients add up where they are wanted."""
    import torch

    given = traced.tensors_of(inputs)
    labels = [given[index] for index in traced.labels]
    if traced.losses:
        stages[-1].begin_loss(labels, SAMPLES)
    total = torch.zeros(())
    for start, stop in shares:
        values: Any = [value[start:stop] for value in given]
        passes: list[tuple[list[Tensor], Any]] = []
        for stage in stages:
            wanted = [value.requires_grad for value in values]
            values = [
                value.detach().clone().requires_grad_(wants)
                for value, wants in zip(values, wanted, strict=True)
            ]
            outputs = stage(*values)
            passes.append((values, outputs))
            values = outputs if isinstance(outputs, tuple) else (outputs,)
        if traced.losses:
            loss = stages[-1].loss(outputs, [label[start:stop] for label in labels])
        else:
            assert model.loss_fn is not None
            loss = model.loss_fn(outputs, targets[start:stop]) * ((stop - start) / SAMPLES)
        total = total + loss.detach()
        if torch.is_grad_enabled():
            _backward(passes, loss)
    return total


def _backward(passes: Sequence[tuple[list[Tensor], Any]], loss: Tensor) -> None:
    import torch

    ends: list[Tensor] = [loss]
    gradients: list[Tensor | None] = [None]
    for index in reversed(range(len(passes))):
        pairs = [
            (end, gradient)
            for end, gradient in zip(ends, gradients, strict=True)
            if end.requires_grad and (gradient is not None or end is loss)
        ]
        if pairs:
            torch.autograd.backward([end for end, _ in pairs], [gradient for _, gradient in pairs])
        gradients = [value.grad for value in passes[index][0]]
        if index:
            before = passes[index - 1][1]
            ends = list(before) if isinstance(before, tuple) else [before]


def _difference(found: Tensor, expected: Tensor) -> float:
    """Of the largest element, relative to the largest of all where that is above 1."""
    if not found.numel():
        return 0.0
    largest = max(1.0, float(expected.abs().max()))
    return float((found.double() - expected.double()).abs().max()) / largest
