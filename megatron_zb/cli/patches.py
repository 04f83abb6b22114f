"""Sampling in patches in ``megatron-zb show`` and ``export``."""

from __future__ import annotations

import argparse
from dataclasses import replace

from megatron_zb.errors import UsageError
from megatron_zb.parsing import flag_of, positive
from megatron_zb.schedules import Costs, Timeline, simulate
from megatron_zb.schedules.features.patches import NAME, idle_share, pipefusion

SHOW_HELP = """\
pipefusion draws a diffusion transformer that samples an image in patches, forward only; --forward
is the time of one patch on one rank:
  megatron-zb show pipefusion --pipeline-size 4 --patches 8 --time-steps 4
"""
EXPORT_HELP = """\
pipefusion writes the timeline of a diffusion transformer that samples, as chrome-trace:
  megatron-zb export pipefusion --pipeline-size 4 --patches 8 --time-steps 4 \\
      --format chrome-trace --output patches.json
"""
UNITS = {"patches": "M", "time_steps": "T"}

_OF_OTHERS = {
    **dict.fromkeys(("num_microbatches", "memory_limit", "chunks", "group_size")),
    **dict.fromkeys(("attention", "recompute", "offload", "cut_output")),
    **dict.fromkeys(("backward", "weight"), 1.0),
    **dict.fromkeys(("forward_comm", "backward_comm"), 0.0),
}
"""Arguments of other schedules, with their defaults."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments that only pipefusion takes."""
    group = command.add_argument_group("sampling in patches (pipefusion)")
    group.add_argument("--patches", type=positive, metavar="M", help="patches of an image")
    group.add_argument(
        "--time-steps", type=positive, metavar="T", help="of the sampler, without its warm-up"
    )


def check(arguments: argparse.Namespace) -> None:
    """Reject arguments that do not apply to the schedule that is named.

    Raises:
        UsageError: names the argument.
    """
    if arguments.name == NAME:
        refused = [it for it, default in _OF_OTHERS.items() if getattr(arguments, it) != default]
        said = f"{NAME} does not take it: leave it out; see --patches and --forward"
    else:
        refused = [name for name in UNITS if getattr(arguments, name) is not None]
        said = f"only {NAME} takes it, not {arguments.name or '--csv FILE'}: leave it out"
    if refused:
        raise UsageError(f"{flag_of(refused[0])}: {said}")


def timeline(arguments: argparse.Namespace) -> Timeline:
    """Simulate the schedule that the arguments describe.

    Raises:
        UsageError: the sizes are too large, or no pass takes any time.
    """
    p, patches, steps = arguments.pipeline_size, arguments.patches, arguments.time_steps
    costs = Costs.uniform(
        pipeline_size=p, forward=arguments.forward, backward=1.0, weight=0.0, p2p=arguments.p2p
    )
    schedule = pipefusion(p, patches, steps, costs)
    share = f"{idle_share(p, patches, steps):.1%}"
    reason = f"by formula, the bubble rate is {share} if messages take no time"
    return simulate(replace(schedule, reason=reason), costs)
