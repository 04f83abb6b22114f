"""Ranks that do not mean the same run end with one sentence, on every one of them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from megatron_zb.job.agreement import Disagreement, agree, compare


def outcomes(ranks: list[dict[str, Any] | None], seconds: float = 20.0) -> list[str]:
    """What each rank is told; None is a rank that never comes."""
    store = HashStore()

    def one(rank: int) -> str:
        given = dict(ranks[rank] or {})
        problem = given.pop("problem", None)
        try:
            agree(store, rank, len(ranks), given, problem, seconds=seconds)
        except Disagreement as error:
            return str(error)
        return "agreed"

    there = [rank for rank, given in enumerate(ranks) if given is not None]
    with ThreadPoolExecutor(len(there)) as pool:
        return list(pool.map(one, there))


SAME = {"--pipeline-schedule": "v-half", "microbatches": 8, "data types": ["bf16"]}


def test_equal_ranks_go_on() -> None:
    assert outcomes([SAME, dict(SAME), SAME]) == ["agreed"] * 3


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"microbatches": 6}, "microbatches 8 on rank 0, but microbatches 6 on rank 2"),
        ({"data types": ["fp32"]}, "data types ['bf16'] on rank 0, but data types ['fp32']"),
        ({"NCCL_ALGO": "Ring"}, "no NCCL_ALGO on rank 0, but NCCL_ALGO Ring on rank 2"),
        ({"problem": "no data"}, "on rank 2: no data"),
    ],
)
def test_a_difference_is_told_on_every_rank(other: dict[str, Any], words: str) -> None:
    said = outcomes([SAME, SAME, {**SAME, **other}])
    assert len(set(said)) == 1
    assert words in said[0]


def test_a_value_that_only_rank_0_has_is_a_difference() -> None:
    said = set(outcomes([{**SAME, "NCCL_ALGO": "Ring"}, SAME]))
    assert len(said) == 1
    assert "NCCL_ALGO Ring on rank 0, but no NCCL_ALGO on rank 1" in said.pop()


def test_a_problem_of_all_ranks_is_nobodys_in_particular() -> None:
    assert set(outcomes([{"problem": "too few layers"}] * 3)) == {"too few layers"}


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named_in_time(missing: int) -> None:
    start = time.monotonic()
    ranks: list[dict[str, Any] | None] = [SAME] * 3
    ranks[missing] = None
    said = set(outcomes(ranks, seconds=1.0))
    assert said == {f"rank {missing} has not come to the start of the job within 1 s"}
    assert time.monotonic() - start < 20


def test_a_problem_is_reported_before_values_that_its_rank_does_not_have_yet() -> None:
    whole = {"values": {"--a": 1, "--b": 2}, "problem": ""}
    failed = {"values": {"--a": 1}, "problem": "no such file"}
    assert compare({0: whole, 1: failed}) == "on rank 1: no such file"
    different = {"values": {"--a": 3}, "problem": "no such file"}
    assert "with different arguments: --a 1 on rank 0" in compare({0: whole, 1: different})
