"""Adapters from keywords: those of ``ScheduleSettings`` and of ``JobSizes`` together."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter
from megatron_zb.schedules import Schedule

_SETTINGS = {each.name for each in fields(ScheduleSettings)}


def scheduled(schedule: str | Schedule, **values: Any) -> PipelineAdapter:
    """The adapter of a named schedule, or of a finished one."""
    settings = {name: value for name, value in values.items() if name in _SETTINGS}
    sizes = JobSizes(**{name: value for name, value in values.items() if name not in _SETTINGS})
    if isinstance(schedule, Schedule):
        return PipelineAdapter.of_table(schedule, sizes)
    return PipelineAdapter.create(ScheduleSettings(pipeline_schedule=schedule, **settings), sizes)
