"""Page of a measured run: its profile, one step beside its prediction, and the explorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_zb.drawing import html_drawing, html_page
from megatron_zb.drawing.chart import MILLISECONDS, memory_lines, one_f_one_b_peak, worst_of
from megatron_zb.drawing.html_page import picture
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile
from megatron_zb.measured.trace import ComparedStep, StepDifference
from megatron_zb.schedules import Timeline


def save_step(path: Path, profile: Profile, compared: ComparedStep) -> None:
    """Write the page of one step, as it ran and as its profile predicts it.

    Raises:
        UsageError: the file cannot be written, or jinja2 is missing.
    """
    nothing: dict[str, Any] = {"rows": [], "missing": {}, "pictures": []}
    context = {"microbatches": profile.num_microbatches, **nothing, **step_of(compared)}
    write_run(path, profile, context, [compared.predicted])


def write_run(path: Path, profile: Profile, context: dict[str, Any], own: list[Timeline]) -> None:
    """Fill ``run.html``; ``context`` has its tables and pictures, ``own`` are drawn."""
    embedding, output = Fit.of(profile).in_layers()
    p, number = profile.pipeline_size, profile.placement.pipeline_rank
    html_page.write(
        path,
        html_page.PARTS / "run.html",
        {
            "title": f"{profile.schedule} on {p} ranks, measured - megatron_zb",
            "profile": profile,
            "ends": f"the embedding counts for {embedding:.2f} layers, the output layer for "
            f"{output:.2f}",
            "stages": _stages(profile),
            "links": [
                {
                    "from": number(link.source),
                    "to": number(link.target),
                    "ms": f"{1000 * link.seconds:.4g}",
                }
                for link in profile.links
            ],
            "explorer": html_page.explorer_context(own, unit=MILLISECONDS),
            **context,
        },
        of_job=True,
    )


def _stages(profile: Profile) -> list[dict[str, str]]:
    return [
        {
            "stage": str(number),
            "rank": str(profile.placement.pipeline_rank(stage.rank)),
            "layers": stage.layers,
            "forward": f"{1000 * stage.forward:.4g}",
            "backward": f"{1000 * stage.backward:.4g}",
            "weight": f"{1000 * stage.weight:.4g}",
            "activation": f"{stage.activation / 2**20:.4g}",
            "held": f"{stage.held_for_weight / 2**20:.4g}",
        }
        for number, stage in enumerate(profile.stages)
    ]


def step_of(compared: ComparedStep | None) -> dict[str, Any]:
    """Return both pictures of a step, and the table of where they differ."""
    if compared is None:
        return {"step": [], "differences": []}
    return {
        "step": pictures_of(
            {
                "measured": compared.measured,
                "predicted from the medians of its passes": compared.predicted,
            }
        ),
        "differences": [_difference(d) for d in compared.differences()],
    }


def _difference(d: StepDifference) -> dict[str, str]:
    return {
        "rank": str(d.rank),
        "measured": f"{1000 * d.measured:.2f}",
        "predicted": f"{1000 * d.predicted:.2f}",
        "compute": f"{1000 * (d.compute_measured - d.compute_predicted):+.2f}",
        "waiting": f"{1000 * (d.waiting_measured - d.waiting_predicted):+.2f}",
        "host": f"{1000 * d.host:+.2f}",
    }


def pictures_of(timelines: dict[str, Timeline]) -> list[dict[str, Any]]:
    """Return pictures of one scale, by name."""
    extent = html_drawing.Extent.of(list(timelines.values()))
    return [_picture(timeline, name, extent) for name, timeline in timelines.items()]


def _picture(timeline: Timeline, name: str, extent: html_drawing.Extent) -> dict[str, Any]:
    peak, baseline = worst_of(memory_lines(timeline)).peak, one_f_one_b_peak(timeline)
    return {
        "name": name,
        "sentence": f"bubble {timeline.bubble_rate:.1%}; at most {peak:.4g} microbatches on a rank "
        f"({peak / baseline:.2f} of 1F1B's); {1000 * timeline.makespan:.4g} ms",
        **picture(timeline, name, MILLISECONDS, extent),
    }
