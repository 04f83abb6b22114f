"""The teacher in a checkpoint of Megatron-Bridge, such as one imported from Hugging Face's format.

Bridge describes the model in ``run_config.yaml`` beside the tensors, by the fields of its provider.
Nothing in that file is built or called.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from torch.distributed.checkpoint import FileSystemReader

from megatron_zb.errors import UsageError
from megatron_zb.files import read_text
from megatron_zb.train.checkpoint import read

_FILE = "run_config.yaml"
_EMBEDDING = "embedding.word_embeddings.weight"

# Arguments of Megatron-LM whose fields have other names.
_FIELDS = {
    "norm_epsilon": "layernorm_epsilon",
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "apply_layernorm_1p": "layernorm_zero_centered_gamma",
    "max_position_embeddings": "seq_length",
}
# What Megatron-LM has no argument for, and what it is in a plain model.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (None, 0.0),
    "heterogeneous_block_specs": (None, False),
    "mrope_section": (None,),
    "softmax_scale": (None,),
    "use_mup": (None, False),
}
_ACTIVATIONS = {True: "torch.nn.functional.silu", False: "torch.nn.functional.gelu"}


def is_of_bridge(path: Path) -> bool:
    """Return whether Megatron-Bridge has written a checkpoint's files."""
    return (path / _FILE).is_file()


def read_arguments(path: Path, flag: str) -> dict[str, Any]:
    """Return the model's arguments by Megatron-LM's names.

    Args:
        path: the directory of the checkpoint's files.
        flag: what named it, for messages.

    Raises:
        UsageError: the file is damaged, or describes a model that no such argument describes.
    """
    fields = _read_model(path / _FILE, flag)
    for name, plain in _PLAIN.items():
        if fields.get(name) not in plain:
            raise _unknown(path, flag, name, fields[name])
    gated = fields.get("gated_linear_unit") is True
    function = fields.get("activation_func")
    target = function.get("_target_") if isinstance(function, Mapping) else function
    if target != _ACTIVATIONS[gated]:
        raise _unknown(path, flag, "activation_func", target)
    tied = fields.get("share_embeddings_and_output_weights", True)
    return (
        {name: value for name, value in fields.items() if not isinstance(value, Mapping)}
        | {name: fields.get(field) for name, field in _FIELDS.items()}
        | {
            "group_query_attention": fields.get("num_query_groups") is not None,
            "padded_vocab_size": _vocabulary(path, flag),
            "swiglu": gated,
            "untie_embeddings_and_output_weights": not tied,
        }
    )


def _read_model(path: Path, flag: str) -> Mapping[str, Any]:
    try:
        whole = yaml.safe_load(read_text(path))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        whole = None
    fields = whole.get("model") if isinstance(whole, Mapping) else None
    if not isinstance(fields, Mapping):
        raise UsageError(
            f"{flag}: {path} does not describe a model: give a checkpoint as Megatron-Bridge has "
            "written it"
        )
    return fields


def _vocabulary(path: Path, flag: str) -> int | None:
    """Return the tokens of the stored embedding, with its padding."""
    stored = read(path, lambda: FileSystemReader(path).read_metadata().state_dict_metadata, flag)
    size = getattr(stored.get(_EMBEDDING), "size", None)
    return None if size is None else int(size[0])


def _unknown(path: Path, flag: str, name: str, value: Any) -> UsageError:
    return UsageError(
        f"{flag}: {path} is of a model with {name} {value}, which blockwise distillation does not "
        "know: give a plain GPT"
    )
