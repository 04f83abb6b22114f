"""Megatron's settings of NCCL communicators, applied to the groups of the channels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_zb import files
from megatron_zb.errors import UsageError
from megatron_zb.runtime.groups import GroupOptions

_PIPELINE = "pp"


def group_options(
    config_path: str | None = None, high_priority_groups: Sequence[str] = ()
) -> GroupOptions:
    """Return Megatron's settings of its pipeline group over the defaults of :class:`GroupOptions`.

    Args:
        config_path: the YAML file of ``--nccl-communicator-config-path``.
        high_priority_groups: the groups of ``--high-priority-stream-groups``.

    Raises:
        UsageError: the file cannot be read, or has no settings by the names of groups.
    """
    nccl: dict[str, Any] = {**GroupOptions().nccl, **_settings(config_path)}
    if _PIPELINE in high_priority_groups:
        nccl["is_high_priority_stream"] = True
    if nccl.get("min_ctas", 0) > nccl["max_ctas"]:
        nccl["max_ctas"] = nccl["min_ctas"]
    return GroupOptions(nccl=nccl)


def _settings(config_path: str | None) -> dict[str, Any]:
    if config_path is None:
        return {}
    flag = f"--nccl-communicator-config-path {config_path}"
    try:
        found = yaml.safe_load(files.read_text(Path(config_path)))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{flag} cannot be read: {' '.join(str(error).split())}") from None
    settings = (found or {}).get(_PIPELINE) or {} if isinstance(found or {}, dict) else None
    if not isinstance(settings, dict):
        raise UsageError(
            f"{flag} is no table of settings by the names of process groups, such as "
            "pp: {max_ctas: 4}"
        )
    return settings
