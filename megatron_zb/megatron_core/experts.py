"""Experts under a schedule: their metrics on ranks without experts, and their paged stash.

Megatron sums a metric of experts, such as an auxiliary loss, over the pipeline, and then over the
group that its routers have named. A rank without routers has no entry, or one without a group.
Where it is the rank that logs, it logs the part of its tensor rank only; where it is not, the
others wait for it. Whether the rank that logs has experts depends on the placement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.schedules.schedule import Schedule


class ExpertMetricsPart(StepPart):
    """Shares the metrics of experts after the first step: no later step counts others."""

    def __init__(self) -> None:
        self._is_due = True

    def after_step(self, step: Step) -> None:
        if step.forward_only or step.captured:
            return
        if self._is_due and getattr(step.config, "num_moe_experts", None):
            share(step.pg_collection.pp, device())
        self._is_due = False


class PagedStashPart(StepPart):
    """Starts the steps of the paged stash, which keeps to the order that it has recorded once."""

    def __init__(self) -> None:
        self._recorded: Schedule | None = None

    def before_step(self, step: Step) -> None:
        if not getattr(step.config, "moe_paged_stash", False):
            return
        if not step.forward_only and step.program.schedule != self._recorded:
            versions.forget_order_of_paged_stash()
            self._recorded = step.program.schedule
        versions.start_paged_stash(step.config, forward_only=step.forward_only)


class _Metric(NamedTuple):
    """A metric as it is sent to other ranks: its size, and its fields with groups by name."""

    size: int
    fields: dict[str, Any]
    groups: dict[str, str | None]


def share(pipeline: dist.ProcessGroup, device: torch.device | str | int) -> None:
    """Give every rank of the pipeline an entry for each metric that one of them has counted.

    Collective over the pipeline; to be called after a training step and before its log.
    """
    known = _groups()
    own = {name: _described(entry, known) for name, entry in versions.expert_metrics().items()}
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


def _described(entry: dict[str, Any], known: dict[str, dist.ProcessGroup]) -> _Metric:
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
    for of_rank in everyone:
        for name, metric in of_rank.items():
            if name not in found or not any(found[name].groups.values()):
                found[name] = metric
    return found
