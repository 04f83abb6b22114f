"""An adapter as a folder of Hugging Face's PEFT, for models with the layers of Llama.

Megatron has one matrix where Hugging Face has several, as ``linear_qkv`` for ``q_proj``,
``k_proj`` and ``v_proj``. All of them get the adapter's ``down`` of that layer, and each its rows
of ``up``:

- ``linear_qkv`` has the query heads of a group, then its key, then its value, group by group;
- ``linear_fc1`` of a gated MLP has the rows of ``gate_proj``, then those of ``up_proj``; with
  tensor parallelism each rank has its part of both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zb import files
from megatron_zb.lora.adapter_file import AdapterJob
from megatron_zb.lora.training import AdapterOptimizer

FOLDER = "peft"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(self_attention|mlp)\.(\w+)\.(down|up)")
_PARTS = {"self_attention": "self_attn", "mlp": "mlp"}


@dataclass(frozen=True)
class Heads:
    """Sizes of a model's layers, of which the rows of a matrix follow.

    Args:
        heads: of attention.
        groups: of heads that share a key and a value.
        size: of a head.
        is_gated: whether the MLP multiplies its rows with a gate, as SwiGLU does.
    """

    heads: int
    groups: int
    size: int
    is_gated: bool

    @classmethod
    def of(cls, config: Any) -> Heads:
        """Return the sizes of Megatron's config."""
        groups = config.num_query_groups or config.num_attention_heads
        return cls(config.num_attention_heads, groups, config.kv_channels, config.gated_linear_unit)


def why_not(config: Any) -> str | None:
    """Return why no folder can be written, None if it can."""
    if find_spec("safetensors") is None:
        return "the package safetensors is not installed"
    if config.multi_latent_attention or getattr(config, "attention_output_gate", False):
        return "its attention is not that of Llama"
    return None


def write(folder: Path, job: AdapterJob, adapter: AdapterOptimizer, config: Any) -> None:
    """Write the folder of an adapter on the first rank; collective over the job.

    Raises:
        UsageError: it cannot be written.
    """
    whole = gathered(adapter)
    if dist.get_rank() != 0:
        return
    from safetensors.torch import save_file

    tensors = dict(renamed(whole, Heads.of(config)))
    targets = sorted({name.split(".")[-3] for name in tensors})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": job.entry.rank,
        "lora_alpha": job.entry.alpha,
        "lora_dropout": job.entry.dropout,
        "bias": "none",
        "target_modules": targets,
    }
    into = folder / job.name / FOLDER
    files.replace(into / "adapter_model.safetensors", lambda new: save_file(tensors, str(new)))
    files.write_text(into / "adapter_config.json", f"{json.dumps(about, indent=2)}\n")


def gathered(adapter: AdapterOptimizer) -> dict[str, list[torch.Tensor]]:
    """Return the parts of every matrix by tensor-parallel rank, on the first rank of the job.

    A matrix that is not sharded has one part. Other ranks get nothing.
    """
    own = {}
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        for name, weight in adapter.named_weights().items():
            dim = weight.partition_dim if getattr(weight, "tensor_model_parallel", False) else None
            if first or dim is not None:
                own[name] = dim, weight.detach().cpu()
    place = parallel_state.get_tensor_model_parallel_rank()
    of_all: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((place, own), of_all)
    found: dict[str, dict[int, torch.Tensor]] = {}
    dims = {}
    for at, parts in of_all or []:
        for name, (dim, part) in parts.items():
            found.setdefault(name, {})[at] = part
            dims[name] = dim
    return {
        name: [torch.cat(ordered, dim=1)] if dims[name] == 1 else ordered
        for name, parts in found.items()
        for ordered in [[parts[at] for at in sorted(parts)]]
    }


def renamed(
    matrices: Mapping[str, Sequence[torch.Tensor]], heads: Heads
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of PEFT by name.

    Args:
        matrices: the parts of each matrix by its name in Megatron, such as
            ``decoder.layers.0.mlp.linear_fc1.up``.
        heads: sizes of the model.
    """
    for name, parts in matrices.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            continue
        layer, part, module, kind = found.groups()
        letter, of_parts = ("B", _rows) if kind == "up" else ("A", _same)
        for own, rows in of_parts(module, parts, heads):
            place = f"base_model.model.model.layers.{layer}.{_PARTS[part]}.{own}"
            yield f"{place}.lora_{letter}.weight", rows.contiguous()


def _same(
    module: str, parts: Sequence[torch.Tensor], heads: Heads
) -> Iterator[tuple[str, torch.Tensor]]:
    for name in _names(module, heads):
        yield name, parts[0].clone()


def _rows(
    module: str, parts: Sequence[torch.Tensor], heads: Heads
) -> Iterator[tuple[str, torch.Tensor]]:
    names = _names(module, heads)
    if module == "linear_qkv":
        whole = torch.cat(list(parts))
        of_group = [heads.heads // heads.groups * heads.size, heads.size, heads.size]
        groups = whole.reshape(heads.groups, sum(of_group), -1)
        for name, rows in zip(names, groups.split(of_group, dim=1), strict=True):
            yield name, rows.reshape(-1, whole.shape[1])
    elif len(names) > 1:
        halves = zip(*(part.chunk(2) for part in parts), strict=True)
        yield from zip(names, map(torch.cat, halves), strict=True)
    else:
        yield names[0], torch.cat(list(parts))


def _names(module: str, heads: Heads) -> tuple[str, ...]:
    gated = ("gate_proj", "up_proj") if heads.is_gated else ("up_proj",)
    return {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": gated,
        "linear_fc2": ("down_proj",),
    }[module]
