"""Pipeline schedules: the order of passes on every rank. Pure Python, without torch or Megatron."""

from megatron_zb.schedules.catalog import build, names
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.lowering import Program, lower
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.request import Limit
from megatron_zb.schedules.schedule import InvalidSchedule, Report, Schedule
from megatron_zb.schedules.simulator import Timeline, simulate

__all__ = [
    "Costs",
    "InvalidSchedule",
    "Limit",
    "Pair",
    "Pass",
    "PassKind",
    "Placement",
    "Program",
    "Report",
    "Schedule",
    "Timeline",
    "build",
    "lower",
    "names",
    "simulate",
]
