"""Metrics of experts, such as their auxiliary losses, on pipeline ranks that hold no experts.

Megatron sums a metric over the pipeline, and then over the group that its routers have named. A
rank without routers has no entry, or one without a group. Where it is the rank that logs, it logs
the part of its tensor rank alone; where it is not, it leaves the others waiting. Whether the rank
that logs has experts depends on the placement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zb.megatron_core import versions


class _Metric(NamedTuple):
    """What other ranks have to know of an entry: its size, and its fields with groups by name."""

    size: int
    fields: dict[str, Any]
    groups: dict[str, str | None]


def share(pipeline: dist.ProcessGroup, device: torch.device | str | int) -> None:
    """Give every rank of the pipeline an entry for each metric that one of them has counted.

    Collective over the pipeline; to be called after a training step and before its log.
    """
    known = _groups()
    own = {name: _told(entry, known) for name, entry in versions.expert_metrics().items()}
    everyone: list[dict[str, _Metric]] = [{}] * pipeline.size()
    dist.all_gather_object(everyone, own, group=pipeline)
    for name, metric in _of_routers(everyone).items():
        if name in own and any(own[name].groups.values()):
            continue
        fields = metric.fields | {f: g and known[g] for f, g in metric.groups.items()}
        if name not in own:
            fields["values"] = torch.zeros(metric.size, device=device)
        versions.set_expert_metric(name, fields)


def _groups() -> dict[str, dist.ProcessGroup]:
    return {
        "tp_cp": parallel_state.get_tensor_and_context_parallel_group(),
        "tp_dp_cp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    }


def _told(entry: dict[str, Any], known: dict[str, dist.ProcessGroup]) -> _Metric:
    fields = {n: v for n, v in entry.items() if n != "values" and not n.endswith("_group")}
    groups = {n: _name_of(v, known) for n, v in entry.items() if n.endswith("_group")}
    return _Metric(entry["values"].numel(), fields, groups)


def _name_of(group: Any, known: dict[str, dist.ProcessGroup]) -> str | None:
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    return next((n for n, g in known.items() if dist.get_process_group_ranks(g) == ranks), None)


def _of_routers(everyone: list[dict[str, _Metric]]) -> dict[str, _Metric]:
    """Return the metrics of all ranks, each as a rank has it whose routers have named a group."""
    found: dict[str, _Metric] = {}
    for told in everyone:
        for name, metric in told.items():
            if name not in found or not any(found[name].groups.values()):
                found[name] = metric
    return found
