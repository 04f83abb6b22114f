"""Differences between the supported versions of Megatron; the only file that checks versions.

Supported are megatron-core and Megatron-LM 0.16 and 0.19. Importing this file imports no Megatron.
The requirements on Transformer-Engine are here, too.
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
    """Return whether a (major, minor, ...) version is supported."""
    return tuple(version[:2]) in _SERIES


def oldest_to_install() -> str:
    """Return the argument of pip install for the oldest supported series of megatron-core."""
    major, minor = _SERIES[0]
    return f"megatron-core>={major}.{minor},<{major}.{minor + 1}"


@dataclass(frozen=True)
class Needs:
    """Requirements for importing Megatron-LM's training loop, besides megatron-core's own."""

    python: tuple[int, int]
    packages: tuple[tuple[str, str], ...]
    """Names of each module, and of the package that holds it."""


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
    """Return the unconditional imports of Megatron-LM of a supported version."""
    major, minor = version[:2]
    return _NEEDS[major, minor]


def transformer_engine_is_supported(version: str) -> bool:
    """Return whether linear layers of Transformer-Engine, e.g. ``2.9.0+70f53666``, can split."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and tuple(map(int, found.groups())) >= OLDEST_TRANSFORMER_ENGINE


def chunk_builders() -> list[tuple[ModuleType, str]]:
    """Return the functions of Megatron-LM whose first argument builds one model chunk.

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
    """Return the function that sends a batch to the tensor-parallel ranks; in core after 0.16."""
    from megatron.core import utils as core_utils
    from megatron.training import utils as training_utils

    name = "get_batch_on_this_tp_rank"
    return (core_utils if hasattr(core_utils, name) else training_utils), name


def process_groups() -> Any:
    """Return the process groups of Megatron's schedules and its reduction of gradients.

    From 0.18 on the latter needs more than before where experts have a bias, and from 0.19 on
    Megatron's schedules have a builder of their own, which includes all that they need.
    """
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    names = ("tp", "pp", "cp", "embd", "pos_embd", "dp", "dp_cp", "tp_dp_cp")
    return ProcessGroupCollection.use_mpu_process_groups(list(names))


def packed_samples_reach_every_stage() -> bool:
    """Return whether ``--sft`` gives sample ends to every stage; in 0.16 only to outer ones."""
    from megatron.core.package_info import MAJOR, MINOR

    return (MAJOR, MINOR) >= (0, 17)


def data_parallel_group(pg_collection: Any) -> Any:
    """Return the group to count tokens over; 0.19 widens it where weights are sharded, too."""
    return getattr(pg_collection, "dp_cp_gtp_remat", None) or pg_collection.dp_cp
