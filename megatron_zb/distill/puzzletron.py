"""Block configurations of puzzletron, the compression by blocks of NVIDIA Model-Optimizer.

Read are a model's ``config.json``, a ``replacement_library.json`` and a ``solutions.json`` with one
solution; written is a model's list ``block_configs``. Weights stay where they are: students start
from the teacher's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_zb.distill.student import (
    Attention,
    BlockShape,
    Candidate,
    Library,
    Mlp,
    TeacherShape,
    shape_of,
)
from megatron_zb.errors import UsageError
from megatron_zb.files import read_text

_MOST = 1 << 28  # bytes: a library of 100 layers with 100 children each has 8 million


@dataclass(frozen=True)
class BlockConfigs:
    """A student or a library by puzzletron's files: configurations of each block's children."""

    path: Path
    blocks: Sequence[Sequence[Mapping[str, Any]]]

    @property
    def name(self) -> str:
        """As the name of a file of ``configs/students``."""
        return self.path.name

    def library(self, teacher: TeacherShape) -> Library:
        """Return the candidates of every block; copies of the teacher's among others are left out.

        Raises:
            UsageError: a block does not fit the teacher, or has what no student here has.
        """
        if len(self.blocks) != teacher.num_layers:
            raise UsageError(
                f"{self.path} describes {len(self.blocks)} blocks, the teacher has "
                f"{teacher.num_layers}: give the file of a student of this teacher"
            )
        return tuple(self._shapes(block, teacher) for block in range(teacher.num_layers))

    def _shapes(self, block: int, teacher: TeacherShape) -> tuple[BlockShape, ...]:
        shapes: dict[str, BlockShape] = {}
        for config in self.blocks[block]:
            try:
                candidate = _candidate(config, teacher.experts_of(block))
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{self.path}: a configuration of block {block} is not understood "
                    f"({_reason(error)}): give attention and ffn as puzzletron's BlockConfig has "
                    "them"
                ) from error
            shape = shape_of(candidate, teacher, block)
            shapes[shape.name] = shape
        others = [s for s in shapes.values() if not _is_teachers(s, teacher, block)]
        return tuple(others or shapes.values())


def read(path: Path) -> BlockConfigs:
    """Read a file of puzzletron's.

    Raises:
        UsageError: it cannot be read, or is none of those that are known.
    """
    try:
        content = json.loads(read_text(path, _MOST))
        return BlockConfigs(path, _blocks(content))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} has no configurations of blocks ({_reason(error)}): give a config.json with "
            "block_configs, a replacement_library.json, or a solutions.json with one solution"
        ) from error


def _reason(error: BaseException) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]


def _blocks(content: Any) -> list[list[Mapping[str, Any]]]:
    if isinstance(content, Mapping):
        return [[_object(config)] for config in content["block_configs"]]
    entries = [_object(entry) for entry in content]
    if not entries:
        raise ValueError("the list is empty")
    if "parent_layer_indices" not in entries[0]:
        if len(entries) > 1:
            raise ValueError(f"{len(entries)} solutions")
        (solution,) = entries
        name = "chosen_block_configs" if "chosen_block_configs" in solution else "block_configs"
        return [[_object(config)] for config in solution[name]]
    return _of_replacements(entries)


def _of_replacements(entries: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        blocks, children = entry["parent_layer_indices"], entry["child_block_configs"]
        if len(blocks) != 1 or len(children) != 1:
            raise ValueError(f"{len(children)} blocks stand for {len(blocks)}")
        found.setdefault(int(blocks[0]), []).append(_object(children[0]))
    if set(found) != set(range(len(found))):
        raise ValueError(f"block {min(set(range(len(found))) - set(found))} has none")
    return [found[block] for block in range(len(found))]


def _object(value: Any) -> Mapping[str, Any]:
    """Return a mapping, which may be written as text within the text."""
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping):
        raise TypeError(f"{type(found).__name__} in place of a mapping")
    return found


# --- one configuration

_NO_OTHERS = ("llama4", "mamba", "sparsify")


def _candidate(config: Mapping[str, Any], experts: int) -> Candidate:
    """Return the candidate of a configuration, from the number of experts of the block's teacher.

    Raises:
        KeyError, TypeError, ValueError: it has what no candidate has.
    """
    parallel = config.get("parallel_blocks")
    if parallel is not None:
        if len(parallel) != 1:
            raise ValueError(f"{len(parallel)} parallel blocks")
        config = _object(parallel[0])
    attention, ffn = _object(config["attention"]), _object(config["ffn"])
    for name in _NO_OTHERS:
        if attention.get(name) or ffn.get(name):
            raise ValueError(name)
    in_name, heads = _attention(attention)
    out_name, mlp = _mlp(ffn, experts)
    return Candidate(name=f"{in_name}-{out_name}", attention=heads, mlp=mlp, learning_rate=None)


def _attention(config: Mapping[str, Any]) -> tuple[str, Attention]:
    if config.get("no_op"):
        return "no-attention", Attention(kind="no_op", query_groups=None)
    if config.get("replace_with_linear"):
        return "linear-attention", Attention(kind="linear", query_groups=None)
    groups = config["num_key_value_heads"]
    return f"kv{groups}", Attention(kind="attention", query_groups=groups)


def _mlp(config: Mapping[str, Any], experts: int) -> tuple[str, Mlp]:
    none = {"ffn_hidden_size": None, "ffn_fraction": None, "experts": None}
    if config.get("no_op"):
        return "no-mlp", Mlp(kind="no_op", **none)
    if config.get("replace_with_linear"):
        return "linear-mlp", Mlp(kind="linear", **none)
    moe = config.get("moe")
    if (moe is not None) != bool(experts):
        raise ValueError(f"{'no ' * (moe is None)}moe, where the teacher has {experts} experts")
    if moe is None:
        width = config["intermediate_size"]
        return f"ffn{width}", Mlp(kind="mlp", **{**none, "ffn_hidden_size": width})
    count, width = moe["num_local_experts"], moe["expert_intermediate_dim"]
    sizes = {"ffn_hidden_size": width, "experts": count}
    return f"experts{count}x{width}", Mlp(kind="mlp", **{**none, **sizes})


def _is_teachers(shape: BlockShape, teacher: TeacherShape, block: int) -> bool:
    mine = shape.is_layer and shape.num_query_groups == teacher.num_query_groups
    width, experts = teacher.width_of(block), teacher.experts_of(block)
    return mine and (shape.ffn_hidden_size, shape.num_experts) == (width, experts)


@dataclass(frozen=True)
class Routing:
    """Properties of a router that candidates do not change."""

    experts_per_token: int
    shared_width: int
    """Of the shared experts, 0 for none."""


def described(shapes: Sequence[BlockShape], routing: Routing) -> dict[str, Any]:
    """Return a model's ``block_configs``, as puzzletron's BlockConfig takes them.

    Sizes stand beside ``replace_with_linear``, too, where they mean nothing: it requires them.
    """
    blocks = []
    for shape in shapes:
        heads = None if shape.attention == "no_op" else shape.num_query_groups
        attention = _kind(shape.attention) | {"num_key_value_heads": heads}
        ffn = _kind(shape.mlp) | {"intermediate_size": None, "moe": None}
        if shape.mlp == "mlp" and shape.num_experts:
            ffn["moe"] = {
                "num_local_experts": shape.num_experts,
                "num_experts_per_tok": routing.experts_per_token,
                "expert_intermediate_dim": shape.ffn_hidden_size,
                "shared_expert_intermediate_dim": routing.shared_width,
            }
        elif shape.mlp != "no_op":
            ffn["intermediate_size"] = shape.ffn_hidden_size
        blocks.append({"attention": attention, "ffn": ffn, "parallel_blocks": None})
    return {"block_configs": blocks}


def _kind(kind: str) -> dict[str, Any]:
    return {"no_op": kind == "no_op", "replace_with_linear": kind == "linear"}
