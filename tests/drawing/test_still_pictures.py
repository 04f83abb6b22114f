"""Pages of schedules with passes that the scripts do not know: pictures stand still."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import measured_runs
import pytest
from pages import Element, page_of
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.drawing import html_drawing
from megatron_zb.drawing.chart import COST_UNIT
from megatron_zb.drawing.html_run import save_step
from megatron_zb.measured.profile import HostLinkProfile, Profile
from megatron_zb.measured.trace import ComparedStep, compared, of_spans
from megatron_zb.schedules import Costs, PassKind, Schedule
from megatron_zb.schedules.search.place_w import split_all

pytestmark = pytest.mark.usefixtures("brief_searches")

SIZES = ["--pipeline-size", "4", "--num-microbatches", "8"]
RECOMPUTED = ["v-half", *SIZES, "--memory-limit", "0.4", "--recompute", "0.03"]
MOVED = ["v-half", *SIZES, "--memory-limit", "0.4", "--offload", "0.9"]
CUT = ["v-half", *SIZES, "--cut-output", "1"]


def drawn(path: Path) -> set[str]:
    """The kinds of passes that have bars."""
    return {bar.attributes["data-kind"] for bar in page_of(path).all("path", of="bars")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "kinds", "copies", "fact"),
    [
        (RECOMPUTED, {"R"}, 0, "R of a microbatch on a rank"),
        (MOVED, set(), 8, "a copy to the host of a microbatch on a rank"),
        (CUT, {"O", "P", "V"}, 0, "transfer between ranks"),
    ],
    ids=["recomputed", "offloaded", "sharded"],
)
def test_a_page_of_a_schedule(
    tmp_path: Path, arguments: list[str], kinds: set[str], copies: int, fact: str
) -> None:
    path = tmp_path / "page.html"
    assert cli.main(["show", *arguments, "--output", str(path)]) == 0
    assert drawn(path) & {"R", "O", "P", "V", "D", "H"} == kinds
    page = page_of(path)
    picture = page.one("section", id="picture")
    assert len(picture.all("path", of="held")) == 4
    assert len(picture.all("path", of="copies")) == copies
    assert len(picture.all("path", of="host")) == copies / 2
    assert fact in page.one("table", of="facts").text
    assert "data-picture" not in picture.one("div", of="picture").attributes
    data = json.loads(page.one("script", id="explorer-data").text)
    assert (data["initial"]["schedule"], data["initial"]["limit"]) == ("1f1b", None)


def ran(schedule: Schedule, profile: Profile) -> ComparedStep:
    """A step that took what the profile says, a little later."""
    costs = profile.costs(schedule.placement, host=False)
    costs = profile.with_offload(profile.with_recomputation(costs))
    timeline = schedules.simulate(schedule, costs)
    ranks = zip(schedule.ranks, timeline.start, timeline.end, strict=True)
    spans = [[(p, a + 0.5, b + 0.5) for p, a, b in zip(*rank, strict=True)] for rank in ranks]
    return compared(profile, of_spans(spans), "a test")


def test_the_step_of_a_run_with_recomputation(tmp_path: Path) -> None:
    profile = measured_runs.profile().model_copy(
        update={"host_link": HostLinkProfile(bandwidth=1e9, full_duplex=True)}
    )
    kept = schedules.build(
        profile.schedule,
        pipeline_size=profile.pipeline_size,
        num_microbatches=profile.num_microbatches,
        costs=Costs.uniform(
            pipeline_size=profile.pipeline_size, forward=1.0, backward=1.0, weight=1.0
        ),
    )
    found = ran(with_recompute_offload(split_all(kept), 1, recompute=0.4, offload=0.4), profile)
    assert {p.kind for rank in found.measured.schedule.ranks for p in rank} >= {
        PassKind.R,
        PassKind.D,
        PassKind.H,
    }
    late = found.measured.makespan - found.predicted.makespan
    assert late == pytest.approx(0.0), "what was recomputed and copied is predicted, too"
    path = tmp_path / "step.html"
    save_step(path, profile, found)
    section: Element = page_of(path).one("section", id="step")
    assert len(section.all("svg", of="schedule")) == 2
    assert "R" in drawn(path)


def test_the_scripts_get_the_title_the_order_and_the_costs_of_a_picture() -> None:
    built = schedules.build("zb-h1", pipeline_size=2, num_microbatches=3)
    equal = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.5, weight=0.5)
    found = html_drawing.data(schedules.simulate(built, equal), "a title", COST_UNIT)
    assert found["title"] == "a title"
    assert (found["order"]["p"], found["order"]["m"]) == (2, 3)
    assert (found["costs"]["forward"], found["costs"]["backward"]) == ([1.0], [1.5])
    assert found["times"] is found["extent"] is None
    assert found["unit"] == asdict(COST_UNIT)
