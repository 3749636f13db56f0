"""Trains classes of Transformers, built small, with and without a schedule, and compares losses, gradients and buffers
to the bit.

    python -m benchmarks.transformers_classes                          all classes for text and images
    python -m benchmarks.transformers_classes --shard 3/8 --out 3.jsonl   every eighth class, from the fourth on; one
    line of JSON each python -m benchmarks.transformers_classes --only Llama,T5          classes whose names begin so

Each class takes two steps of SGD by a random schedule that recomputes much. What plain PyTorch cannot build or train in
this size is counted as invalid.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import click
import torch
from any_schedule import AnySchedule
from torch import nn

from monet_like.errors import MonetError

from .verdicts import INVALID, RANDOM, RIGHT, WRONG, Verdict, judged, out_option, refusal, report, same, shard_option

#: Values for fields of configurations, wherever a configuration has them. Two layers, 64 features, 4 heads, 4 experts.
_SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size"), 64),
    **dict.fromkeys(("n_layer", "n_layers", "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "hidden_dim", "ffn_dim"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "q_lora_rank", "kv_lora_rank", "sliding_window"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "patch_size"), 8),
    **{"vocab_size": 96, "num_key_value_heads": 2, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"first_k_dense_replace": 1, "image_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "decoder_start_token_id": 0,
}  # fmt: skip
#: Fields that some configurations derive from others, to be left out where a configuration refuses them.
_DERIVED = ((), ("head_dim",), ("num_key_value_heads",), ("head_dim", "num_key_value_heads", "sliding_window"))
#: Larger models are skipped: they have no small size.
_PARAMETERS = 6_000_000


def classes() -> Iterator[tuple[str, str]]:
    """The type of a model and the name of a class, of all causal, masked, sequence-to-sequence and image classes."""
    from transformers.models.auto import modeling_auto as auto

    for names in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    ):  # fmt: skip
        for kind, name in names.items():
            yield kind, name if isinstance(name, str) else name[0]


def built(kind: str, name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A small model in training mode, and its arguments with labels."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = _configuration(CONFIG_MAPPING[kind])
    if hasattr(config, "use_cache"):
        config.use_cache = False
    cls = getattr(transformers, name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > _PARAMETERS:
        raise ValueError(f"{count:,} parameters")
    torch.manual_seed(0)
    model = cls(config).train()
    if "ForImage" in name:
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        return model, {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.tensor([0, 1])}
    ids = torch.randint(3, 90, (2, 24))
    return model, {"input_ids": ids, "labels": ids}


def _configuration(cls: Any) -> Any:
    try:
        default = cls()
    except Exception:  # it needs arguments
        default = None
    known = {k: v for k, v in _SMALL.items() if default is None or getattr(default, k, None) is not None}
    error: Exception | None = None
    for derived in _DERIVED:
        try:
            return cls(**{field: value for field, value in known.items() if field not in derived})
        except Exception as refused:
            error = refused
    assert error is not None
    raise error


def trained(model: nn.Module, arguments: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
    """Losses of two steps of SGD, and the gradients and buffers after them."""
    torch.manual_seed(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: dict[str, torch.Tensor | None] = {}
    for number in range(2):
        optimizer.zero_grad()
        loss = model(**arguments).loss
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        found.update({f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()})
        optimizer.step()
    return {**found, **dict(model.named_buffers())}


def compared(kind: str, name: str) -> Verdict:
    """Train a class with a random schedule and without."""
    return judged(name, lambda: _compared(kind, name))


def _compared(kind: str, name: str) -> tuple[str, object]:
    try:
        model, arguments = built(kind, name)
        plain, again = (trained(copy.deepcopy(model), arguments) for _ in range(2))
    except Exception as error:  # whatever a library raises for a size that it does not take
        return INVALID, f"{type(error).__name__}: {error}"
    if _differing(plain, again):
        return RANDOM, ""
    try:
        ours = trained(AnySchedule(model, 3), arguments)
    except MonetError as error:
        return refusal(error)
    differing = _differing(plain, ours)
    if differing:
        return WRONG, f"{len(differing)} of {len(plain)} tensors differ, {differing[0]} among them"
    return RIGHT, ""


def _differing(one: Mapping[str, torch.Tensor | None], other: Mapping[str, torch.Tensor | None]) -> list[str]:
    return [name for name in {**one, **other} if not same(one.get(name), other.get(name))]


def run(shard: int, shards: int, only: tuple[str, ...]) -> Iterator[Verdict]:
    """Compare every ``shards``-th class from ``shard`` on, of those whose names begin with one of ``only``."""
    for number, (kind, name) in enumerate(classes()):
        if number % shards == shard and name.startswith(only):
            yield compared(kind, name)


@click.command()
@shard_option
@click.option("--only", default="", help="Beginnings of names of classes, with commas between them.")
@out_option
def main(shard: tuple[int, int], only: str, out: Path | None) -> None:
    """Train classes of Transformers by schedules; exit code 1 if one is wrong or crashed."""
    report(run(*shard, tuple(only.split(","))), "classes of Transformers", out)


if __name__ == "__main__":
    main()
