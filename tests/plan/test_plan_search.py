"""What megatron-zb plan finds and recommends, and how it says so."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import auto_plans
import pytest
from brief_searches import briefly
from small_models import ROOT, SMALL, WHOLE, a100, load, small

from megatron_zb import schedules
from megatron_zb.cli import main as cli
from megatron_zb.parsing import GIB
from megatron_zb.plan import cli as plan
from megatron_zb.plan import table
from megatron_zb.plan.features.catalog import FEATURES
from megatron_zb.plan.prediction import IterationSettings, predict
from megatron_zb.plan.reasons import reason, recommendation, recommended
from megatron_zb.plan.search import Plan, search, searched_by_auto, with_those_of_auto
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import cut_into_stages
from megatron_zb.plan.strategy import (
    MEGATRON_1F1B,
    MEGATRON_INTERLEAVED,
    Choices,
    candidates_of,
)
from megatron_zb.plan.table import flags
from megatron_zb.plan.workers import workers
from megatron_zb.schedules.placement import wave


def job(**changes: Any) -> PlanJob:
    first = PlanJob(small(), a100(), 8, 20 * GIB, 32, 1024, Choices(recompute=("none",)))
    return replace(first, **changes)


def test_what_is_simulated_to_need_a_little_more_than_there_is_does_not_fit() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(2,), recompute=("none",))
    asked = job(choices=choices, gpus=4)
    (fits,) = (r for r in search(asked, candidates_of(["zb-h1"])).ranked if r.candidate == "zb-h1")
    for share, is_there in ((1.01, True), (0.99, False)):
        plan = search(replace(asked, memory=share * fits.memory.total), candidates_of(["zb-h1"]))
        assert ("zb-h1" in rates(plan)) == is_there
        assert ("zb-h1" in plan.too_large) != is_there


def test_megatrons_own_always_stand_in_the_table() -> None:
    plan = search(job(), candidates_of(["zb-h1"]))
    names = [row.candidate for row in plan.ranked]
    assert {MEGATRON_1F1B, MEGATRON_INTERLEAVED, "zb-h1", "no pipeline"} == set(names)
    rates = [row.tokens_per_gpu for row in plan.ranked]
    assert rates == sorted(rates, reverse=True)
    assert all(row.memory.total <= 20 * GIB for row in plan.ranked)
    # A small model is best off without a pipeline, and the table says so.
    assert names[0] == "no pipeline"


def test_progress_has_a_name_and_how_much_is_done() -> None:
    told: list[tuple[str, int, int]] = []
    search(
        job(features=WHOLE),
        candidates_of(["zb-h1"]),
        watch=lambda *each: told.append(each),
    )
    names = ["no pipeline", MEGATRON_1F1B, MEGATRON_INTERLEAVED, "zb-h1", "zb-h1", ""]
    assert told == [(name, min(done, 4), 4) for done, name in enumerate(names)]


def test_a_row_in_json_has_all_that_was_chosen_and_predicted() -> None:
    rows = table.as_json(search(job(features=WHOLE), candidates_of(["zb-h1"])))["ranked"]
    assert {frozenset(row) for row in rows} == {
        frozenset(
            "schedule runs chunks tensor pipeline data context expert expert_tensor precision "
            "microbatch num_microbatches recompute layout vocabulary gain_of_cut "
            "overlaps_all_to_all recomputed offloaded host_bytes seconds tokens_per_second_per_gpu "
            "mfu bubble waiting_kernels exposed_tensor_parallel memory flags reason".split()
        )
    }


def test_interleaved_is_tuned_over_all_its_chunks() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    plan = search(job(choices=choices, gpus=4), candidates_of(["zb-h1"]))
    (found,) = (row for row in plan.ranked if row.candidate == MEGATRON_INTERLEAVED)
    (own,) = (c for c in candidates_of(["zb-h1"]) if c.name == MEGATRON_INTERLEAVED)
    assert list(own.chunk_counts(8, 2)) == [2, 3, 4]
    for chunks in own.chunk_counts(8, 4):
        staged = cut_into_stages(found.load, own, chunks)
        assert staged is not None
        other = predict(staged, own, IterationSettings(32), chunks)
        assert other.tokens_per_gpu <= found.tokens_per_gpu * (1 + 1e-9)


def rates(plan: Plan) -> dict[str, float]:
    return {row.candidate: row.tokens_per_gpu for row in plan.ranked}


def test_auto_is_never_behind_a_schedule_that_it_could_run() -> None:
    """Also where only it was asked for, and where there are too few layers for a V."""
    with briefly():
        _check_auto_leads()


def test_auto_leaves_megatrons_own_as_they_were_asked_for() -> None:
    blocking = candidates_of(["auto"], overlap=False)
    own = [candidate for candidate in with_those_of_auto(blocking, FEATURES) if candidate.megatron]
    assert own == blocking[:2]


def _check_auto_leads() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    everything = rates(search(job(choices=choices, gpus=4), candidates_of(None)))
    assert len(everything) > 8
    assert everything["auto"] >= max(everything.values())
    alone = search(job(choices=choices, gpus=4), candidates_of(["auto"]))
    assert rates(alone)["auto"] == everything["auto"]
    assert {row.candidate for row in alone.ranked} <= {
        "auto",
        MEGATRON_1F1B,
        MEGATRON_INTERLEAVED,
    }
    five = job(choices=choices, gpus=4, model=small(layers=5))  # too few for a V of 8 stages
    found = rates(search(five, candidates_of(["auto", "zb-h1"])))
    assert found["auto"] >= found["zb-h1"] > 0


def test_the_memory_limit_of_auto_keeps_every_rank_within_its_gpu() -> None:
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(2,), recompute=("none",))
    limits = []
    for size in (5, 6, 6.5, 16):
        asked = job(choices=choices, gpus=4, memory=size * GIB)
        setting = candidates_of(["v-half"])[-1]
        staged = cut_into_stages(load(small(), microbatch=2), setting, None)
        assert staged is not None
        costs = staged.costs(blocking=False)
        limit = asked.memory_fraction(staged, costs)
        limits.append(limit)
        if limit is None:
            continue
        most = limit * costs.one_f_one_b_peak()
        assert all(fixed + most <= asked.memory for fixed in costs.fixed)
        tightest = min(asked.memory - fixed for fixed in costs.fixed)
        assert limit == 2.0 or most > tightest - 0.011 * costs.one_f_one_b_peak()
    nothing, *some, most_of_all = limits
    assert nothing is None
    assert most_of_all == 2.0  # twice 1F1B's, however much is left
    assert all(limit is not None and 0 < limit < 2.0 for limit in some)


def test_what_is_predicted_for_auto_is_what_its_flags_build() -> None:
    """The same placement, layout and limit; for the same costs a run's longer search is as fast."""
    choices = Choices(tensor=(1,), pipeline=(4,), microbatch=(1,), recompute=("none",))
    asked = job(choices=choices, gpus=4, global_batch=8)
    staged = cut_into_stages(load(small()), candidates_of(["v-zb"])[-1], None)
    assert staged is not None
    (auto,) = candidates_of(["auto"])[2:]
    with briefly():
        found = searched_by_auto(asked, auto, staged, 8)
    assert found is not None
    assert found.schedule is not None
    assert found.memory_limit is not None
    said = flags(found, 8)
    assert "--pipeline-schedule auto" in said
    assert "--num-virtual-stages-per-pipeline-rank 2" in said
    assert "--pipeline-placement zigzag" in said
    assert f"--pipeline-memory-limit {found.memory_limit:g}" in said
    with briefly():
        run = schedules.build(
            "auto",
            pipeline_size=4,
            num_microbatches=8,
            costs=found.costs,
            placement=wave(4, 2),
            memory_limit=float(f"{found.memory_limit:.2f}"),
            chunks=2,
        )
    assert run.placement == found.schedule.placement
    assert found.costs is not None
    seconds = [schedules.simulate(s, found.costs).makespan for s in (run, found.schedule)]
    assert seconds[0] <= seconds[1] == found.pipeline_seconds


def test_reasons_compare_with_rows_that_are_shown() -> None:
    plan = search(job(gpus=4), candidates_of(["zb-h1", "v-zb", "v-min"]))
    first = plan.ranked[0].candidate
    for index in range(1, len(plan.ranked)):
        text = reason(plan, index)
        assert "than the first: " in text or f"level with the first, {first}" in text
        if not plan.ranked[index].candidate.startswith(("Megatron", "no pipeline")):
            assert "than " in text.split("; ")[-1] or "level with" in text
    assert first == "no pipeline"
    assert recommended(plan) is None
    assert recommendation(plan).startswith("no schedule of this package is worth a change here")


@pytest.mark.slow
def test_a_recommendation_is_what_plan_says() -> None:
    """Of one model here; benchmarks/auto_plans.py --only-recommendations compares all."""
    assert auto_plans.wrong_recommendation(ROOT / "configs" / "models" / "llama2_7b.yaml") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["zb-h1", "v-zb"], pytest.param(["zb-h1", "auto"], marks=pytest.mark.full)]
)
def test_the_plan_is_the_same_whoever_looks(names: list[str]) -> None:
    """Several processes, and this one alone."""
    before = multiprocessing.active_children()
    choices = Choices(tensor=(1,), pipeline=(2, 4), microbatch=(1,), recompute=("none",))
    wanted = job(gpus=4, choices=choices, global_batch=8)
    schedules = candidates_of(names)
    alone = search(wanted, schedules, tries=1)
    with workers(2, after=0.0) as each:
        together = search(wanted, schedules, tries=1, each=each)
    assert table.as_json(together) == table.as_json(alone)
    assert multiprocessing.active_children() == before


def test_it_says_what_it_looks_at_when_it_is_piped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan._Progress, "AFTER", 0.0)
    monkeypatch.setattr(plan._Progress, "EVERY", 0.0)
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    asked = ["plan", "--config", str(path), "--gpus", "4", "--pipeline", "4", "--tries", "1"]
    assert cli.main([*asked, "--schedules", "zb-h1", "--format", "json"]) == 0
    printed = capsys.readouterr()
    json.loads(printed.out)
    lines = printed.err.splitlines()
    assert any(line.startswith("plan: looking at zb-h1") for line in lines)
    assert all(line.startswith("plan: looking at ") for line in lines)


def test_fragments_take_their_share_of_the_memory_that_is_given() -> None:
    device = a100()
    assert device.memory_bytes / GIB == pytest.approx(79.14)
    half = device.with_memory(40 * GIB)
    assert half.fragmentation_bytes == pytest.approx(0.03 * 40 * GIB)
    assert half.reserved_bytes == pytest.approx((0.03 * 40 + 1.5) * GIB)
    plan = search(job(device=half, memory=40 * GIB), candidates_of(["zb-h1"]))
    assert all(row.memory.fragmentation == half.fragmentation_bytes for row in plan.ranked)


def test_flags_can_be_pasted() -> None:
    choices = Choices(tensor=(2,), pipeline=(4,), microbatch=(1,), recompute=("full",))
    plan = search(job(choices=choices), candidates_of(["zb-h1"]))
    by_name = {row.candidate: flags(row, 32) for row in plan.ranked}
    ours = by_name["zb-h1"]
    assert "--pipeline-schedule zb-h1" in ours
    assert {"--tensor-model-parallel-size 2", "--sequence-parallel"} <= set(ours)
    assert "--recompute-granularity full" in ours
    assert not any("--pipeline-schedule" in flag for flag in by_name[MEGATRON_1F1B])


def test_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    sizes = ["--gpus", "4", "--pipeline", "4", "--micro-batch-size", "1", "--tries", "1"]
    sizes += ["--global-batch-size", "8"]
    asked = ["plan", "--config", str(path), *sizes, "--schedules", "v-half,zb-2p"]
    assert cli.main([*asked, "--format", "json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {row["schedule"] for row in plan["ranked"]} == {
        MEGATRON_1F1B,
        MEGATRON_INTERLEAVED,
        "v-half",
        "zb-2p",
    }
    for row in plan["ranked"]:
        parts = [size for name, size in row["memory"].items() if name not in ("rank", "total")]
        assert sum(parts) == pytest.approx(row["memory"]["total"])
    assert cli.main(asked) == 0
    printed = capsys.readouterr().out
    assert "--pipeline-schedule" in printed
    assert " 1  the fastest" in printed
    assert "slower than the first: " in printed
    assert "recommendation: " in printed
    assert "to fragments" in printed
    speed = {row["schedule"]: row["tokens_per_second_per_gpu"] for row in reversed(plan["ranked"])}
    ours = max(speed["v-half"], speed["zb-2p"])
    own = (MEGATRON_INTERLEAVED, MEGATRON_1F1B)  # the usual schedule of tuned jobs first
    assert len(plan["worth"]) == 2
    for said, name in zip(plan["worth"], own, strict=True):
        lead = ours / speed[name] - 1
        assert said.startswith(f"beside {name}")
        assert f"{abs(lead):.1%} {'faster' if lead > 0 else 'slower'}, in " in said
        assert f"worth it? {said}" in printed


def test_help_and_a_plan_need_neither_torch_nor_megatron(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    arguments = ["plan", "--config", str(path), "--gpus", "4", "--schedules", "zb-h1"]
    program = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'matplotlib'): sys.modules[name] = None\n"
        "from megatron_zb.cli.main import main, parser\n"
        "parser().format_help()\n"
        "assert 'pydantic' not in sys.modules\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "flags of the first:" in done.stdout
