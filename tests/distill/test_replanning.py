"""A distribution found anew in training, from what stages took."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from distillation_cases import HALF, LLAMA, TRAINING, _store, enter, job_of
from prepared_text import prepared
from rank_process import Kind
from ranks import RankPools

from megatron_zb.distill import flags, loop, replanning
from megatron_zb.distill.flags import parse
from megatron_zb.distill.replanning import as_measured, better
from megatron_zb.distill.report import BusyTime
from megatron_zb.distill.schedule.distribution import BlockCosts, Distribution
from megatron_zb.errors import UsageError

ALIKE = BlockCosts.of(teacher=[1.0] * 4, student=[2.0] * 4, update=1.0, reduce=4.0)
HALVES = Distribution.parse("0-1:1,2-3:1")


def test_stages_take_what_was_measured() -> None:
    costs = as_measured(ALIKE, HALVES, [52.0, 26.0], microbatches=4)
    assert [costs.stage_seconds(blocks, 1, 4) for blocks, _ in HALVES.ranges] == [52.0, 26.0]
    assert costs.student == (4.0, 4.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("seconds", "expected"), [([52.0, 26.0], None), ([90.0, 26.0], "0-0:1,1-3:1"), ([26, 26], None)]
)
def test_only_what_saves_enough_is_better(seconds: list[float], expected: str | None) -> None:
    """Of four blocks, one of 26 and three of 13 take no less than two of 26: 52."""
    found = better(as_measured(ALIKE, HALVES, seconds, 4), HALVES, 2, 4)
    assert (found and found[0].spec) == expected
    if found:
        assert found[1] == pytest.approx(1 - 71 / 90)


def weights_of(
    corpus: str, folder: str, slow: bool, more: list[str]
) -> tuple[dict[Any, torch.Tensor], str]:
    """A rank's student blocks after a run that thinks its first stage slow, or that is left alone.

    The second run has the distribution that the first ends with.
    """
    enter(LLAMA, folder)
    words = ["--save", f"{folder}/{slow}", "--save-interval", "2", "--train-iters", "4", *more]
    words += ["--redistribute"] if slow else ["--distribution", "0-0:1,1-3:1"]
    with patch.object(flags, "_check_fp8"):  # which refuses what only stand-ins compute
        job = job_of(corpus, folder, [HALF], *words)
    run: list[loop.DistillRun] = []
    finish = loop._finish

    def kept(args: Any, ended: loop.DistillRun, step: int) -> None:
        run.append(ended)
        finish(args, ended, step)

    busy = 90.0 if dist.get_rank() == 0 else 26.0
    with (
        patch.object(loop, "_finish", kept),
        patch.object(loop, "distribution_of", lambda job: HALVES if slow else job_given(job)),
        patch.object(replanning.block_times, "measure", lambda *_: []),
        patch.object(replanning.block_times, "costs", lambda _: ALIKE),
        patch.object(BusyTime, "take", lambda _: (2 * busy, 1000.0)),
    ):
        loop.distil(job, dist.PrefixStore(f"slow {slow}", _store()))
    [last] = run
    blocks = {p.block: p for p in last.stage_blocks.all_student_blocks()}
    weights = {
        (number, name): parameter.detach().clone()
        for number, block in blocks.items()
        for name, parameter in block.layer.named_parameters()
    }
    return weights, last.distribution.spec


def job_given(job: loop.Job) -> Distribution:
    return Distribution.parse(job.args.distribution)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Kind.PLAIN, []),
        (Kind.TRANSFORMER_ENGINE, ["--bf16", "--teacher-fp8", "tensorwise"]),
    ],
    ids=["", "fp8"],
)
def test_a_run_goes_on_where_it_is_faster_with_the_same_bits(
    ranks: RankPools, tmp_path: Path, kind: Kind, more: list[str]
) -> None:
    case: dict[str, Any] = {
        "corpus": prepared(tmp_path, most_bytes=100_000),
        "folder": str(tmp_path / "teacher"),
        "more": more,
    }
    moved, as_given = (ranks(2, kind).run(weights_of, **case, slow=slow) for slow in (True, False))
    for (ours, found), (expected, given) in zip(moved, as_given, strict=True):
        assert found == given == "0-0:1,1-3:1"
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("more", [["--distribution", "0-3:1"], []])
def test_without_checkpoints_there_is_nothing_to_go_on_from(
    more: list[str], tmp_path: Path
) -> None:
    words = [*TRAINING.split(), "--teacher-load", str(tmp_path), "--mock-data", "--redistribute"]
    with pytest.raises(UsageError, match="--redistribute chooses the distribution at checkpoints"):
        parse([*words, *more])
