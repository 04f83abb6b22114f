"""What differs between the versions of Megatron that are served; the only file that asks.

Served are megatron-core and Megatron-LM 0.16 and 0.19. Importing this file imports no Megatron.
What Transformer-Engine must bring is here, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

_SERIES = ((0, 16), (0, 19))
SUPPORTED = "0.16 and 0.19"

# The first whose linear layers ask a store whether, and with what, to compute a weight gradient
# later; what they ask and hand over was the same in all versions up to 2.20.
OLDEST_TRANSFORMER_ENGINE = (2, 3)


def is_supported(version: Sequence[int]) -> bool:
    """Whether a (major, minor, ...) version is one of those served."""
    return tuple(version[:2]) in _SERIES


@dataclass(frozen=True)
class Needs:
    """What Megatron-LM's training loop cannot be imported without, besides megatron-core's own."""

    python: tuple[int, int]
    packages: tuple[tuple[str, str], ...]
    """Name of the module, and of the package that holds it."""


_COMMON = (("packaging", "packaging"), ("setuptools", "setuptools"), ("triton", "triton"))
_NEEDS = {
    (0, 16): Needs(
        (3, 10),
        (
            *_COMMON,
            ("pydantic", "pydantic"),
            ("regex", "regex"),
            ("six", "six"),
            ("yaml", "pyyaml"),
        ),
    ),
    (0, 19): Needs((3, 12), _COMMON),
}


def training_loop_needs(version: Sequence[int]) -> Needs:
    """What Megatron-LM of a served version imports unconditionally."""
    major, minor = version[:2]
    return _NEEDS[major, minor]


def transformer_engine_is_supported(version: str) -> bool:
    """Whether the linear layers of a Transformer-Engine, such as ``2.9.0+70f53666``, can split."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) >= OLDEST_TRANSFORMER_ENGINE


def chunk_builders() -> list[tuple[ModuleType, str]]:
    """The functions of Megatron-LM whose first argument builds one model chunk.

    It is called with the keywords ``pre_process``, ``post_process`` and, if there are several
    chunks, ``vp_stage``. From 0.17 on, models described by a configuration have a way of their own.
    """
    from megatron.training import training

    places = [(training, "get_model")]
    with suppress(ModuleNotFoundError):
        places.append((import_module("megatron.training.models.dist_utils"), _STAGES))
    return places


_STAGES = "build_virtual_pipeline_stages"


def batch_broadcast() -> tuple[ModuleType, str]:
    """The function that hands a batch to the tensor-parallel ranks; moved to core after 0.16."""
    from megatron.core import utils as core_utils
    from megatron.training import utils as training_utils

    name = "get_batch_on_this_tp_rank"
    return (core_utils if hasattr(core_utils, name) else training_utils), name


def process_groups() -> Any:
    """The groups that Megatron's schedules and its reduction of gradients ask for.

    From 0.18 on the latter needs more than before where experts have a bias, and from 0.19 on
    Megatron's schedules have a builder of their own, which knows all that they need.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    names = ("tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp")
    return ProcessGroupCollection.use_mpu_process_groups(list(names))


def packed_samples_reach_every_stage() -> bool:
    """Whether ``--sft`` tells each stage where samples end; in 0.16 the outer ones alone know."""
    from megatron.core.package_info import MAJOR, MINOR

    return (MAJOR, MINOR) >= (0, 17)


def data_parallel_group(pg_collection: Any) -> Any:
    """The group over which tokens are counted; 0.19 widens it where weights are sharded, too."""
    return getattr(pg_collection, "dp_cp_gtp_remat", None) or pg_collection.dp_cp
