"""benchmarks/pipe_bd.py at tiny sizes: what it measures, and that all ways train the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from distilled_blocks import synthetic_costs
from jobs import run_script
from library_of_blocks import LIBRARIES, costs_of, predicted
from ways_to_distil import WithoutRelay, seconds_all_at_once, seconds_block_by_block

from megatron_zb.distill.schedule.distribution import BlockCosts, distribute, evenly

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "pipe_bd.py"
WAYS = [
    "block by block",
    "all blocks at once",
    "pipe-bd",
    "- relaying",
    "- decoupled update",
    "- distribution",
]


@pytest.mark.slow
def test_all_ways_are_timed_and_train_the_same(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = run_script(
        SCRIPT,
        *"--ranks 2 --blocks 3 --student 4 --steps 2 --repetitions 1 --microbatches 4".split(),
        *"--real-blocks 3 --hidden 32 --seq-length 16 --micro-batch 2".split(),
        *"--batch-blocks 3 --batch 4 --tokens 8 16 --output".split(),
        str(path),
    )
    assert done.code == 0, done.stderr
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert json.loads(path.read_text()) == line
    assert [case["times"] for case in line["sleeping"]] == ["equal", "uneven"]
    for case in line["sleeping"]:
        assert list(case["ways"]) == WAYS
        for way in case["ways"].values():
            assert way["seconds"] >= 0.98 * way["predicted"]  # a sleep is never too short
    [real] = line["real"]
    assert list(real["ways"]) == WAYS
    assert 0 < real["difference"] < 1e-4
    assert min(real["block_ms"]["student"]) > 0
    assert [case["tokens"] for case in line["batches"]] == [8, 16]
    for case in line["batches"]:
        assert list(case["ways"]) == [*WAYS[:3], "pipe-bd, shares"]
        assert 0 < case["difference"] < 1e-4  # a whole batch teaches what its shares do together


@pytest.mark.long
def test_a_library_is_timed_in_three_ways() -> None:
    words = "--ranks 2 --blocks 2 --microbatches 2 --steps 1 --repetitions 1"
    done = run_script(SCRIPT.with_name("library_of_blocks.py"), *words.split())
    assert done.code == 0, done.stderr
    [found] = json.loads(done.stdout.splitlines()[-1])["results"]
    cases = found["cases"]
    assert len(cases) == 3
    for ways in cases.values():
        assert all(way["seconds"] >= 0.98 * way["predicted"] for way in ways.values())
        assert ways["candidates"]["predicted"] < ways["one after the other"]["predicted"]


def test_the_results_of_a_library_have_what_is_predicted_for_it() -> None:
    file = SCRIPT.parents[1] / "docs" / "results" / "library_of_blocks.json"
    for result in json.loads(file.read_text(encoding="utf-8"))["results"]:
        for name, shares in LIBRARIES.items():
            together = distribute(costs_of(shares, 8), result["ranks"], 8)
            seconds = predicted(costs_of(shares, 8), together, 8, 8)
            found = result["cases"][name]["candidates"]
            assert found["predicted"] == pytest.approx(seconds, rel=1e-4)
            assert seconds < found["seconds"] < 1.15 * seconds


def test_help_teaches() -> None:
    done = run_script(SCRIPT, "--help")
    assert done.code == 0
    for way in WAYS:
        assert way in done.stdout


# Two ranks: two microbatches each, so that summing takes as long as passing a link once.
COSTS = BlockCosts.of(teacher=[1, 2], student=[3, 4], update=0.5, reduce=[5, 1])


def test_data_parallel_ways_on_paper() -> None:
    # 2 * (1 + 3) = 8, and 2 * (1 + 2 + 4) = 14 more; sums end at 13 and 23; two updates
    assert seconds_block_by_block(COSTS, 2, 4) == 23.5
    # 10 for the first microbatch, 4 and 6 for the second; sums end at 19 and 21
    assert seconds_all_at_once(COSTS, 2, 4) == 21.5
    assert WithoutRelay.like(COSTS).slowest(evenly(2, 2), 4) == 4 * (1 + 2 + 4) + 0.5


@pytest.mark.parametrize("uneven", [False, True])
def test_uneven_blocks_have_the_same_mean(uneven: bool) -> None:
    costs = synthetic_costs(5, (2.0, 6.0), uneven=uneven, update=1, reduce=1)
    assert sum(costs.teacher) == pytest.approx(10)
    assert sum(costs.student) == pytest.approx(30)
    assert costs.teacher[0] == pytest.approx(3.2 if uneven else 2.0)
