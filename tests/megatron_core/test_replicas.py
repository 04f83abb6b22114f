"""Checkpoints of a V with both copies of a tied embedding on one rank, shared out over replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import gpt_cases
import pytest
from brief_searches import briefly
from checkpoint_jobs import Job
from gpt_cases import GPTCase
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import fully_parallel
from ranks import RankPools

from megatron_zb.megatron_core import checkpoints
from megatron_zb.megatron_lm.replacing import replace as replaced
from megatron_zb.megatron_lm.replacing import replace_method

FULL = pytest.mark.full
TIED = GPTCase(tied=True, data_parallel=2)
CASES = {
    "tied": TIED,
    "prediction": GPTCase(multi_token=1, rotary=True, data_parallel=2),
    "bf16": replace(TIED, dtype="bfloat16"),
    "distributed": replace(TIED, distributed_optimizer=True),
    "distributed-buckets": replace(
        TIED, distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=2000
    ),
    "uneven": replace(TIED, layers=5, layout="Et|tt|t|tL"),
}


@contextmanager
def shared_out() -> Iterator[None]:
    """Save and load as Megatron-LM does by ``--ckpt-fully-parallel-save`` and ``-load``."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    save, load = dist_checkpointing.save, dist_checkpointing.load

    def loading(state: Any, path: str) -> Any:
        strategy: Any = serialization.get_default_load_sharded_strategy(path)
        return load(state, path, fully_parallel.FullyParallelLoadStrategyWrapper(strategy, group))

    strategy: Any = serialization.get_default_save_sharded_strategy()
    wrapper = fully_parallel.FullyParallelSaveStrategyWrapper(strategy, group)
    with (
        mock.patch.object(dist_checkpointing, "save", partial(save, sharded_strategy=wrapper)),
        mock.patch.object(dist_checkpointing, "load", loading),
    ):
        yield


@contextmanager
def hooked() -> Iterator[None]:
    with ExitStack() as undo:
        undo.callback(replaced(fully_parallel, checkpoints.SHARING, checkpoints.share_out))
        wrapper = fully_parallel.FullyParallelLoadStrategyWrapper
        undo.callback(replace_method(wrapper, "load", checkpoints.load_apart))
        yield


def losses(case: GPTCase, schedules: list[str | None], folder: Path) -> list[list[float]]:
    """Losses of two steps after a checkpoint of the first, going on and loaded by each."""
    found = []
    for number, schedule in enumerate([schedules[0], *schedules]):
        one = replace(case, layout=case.layout if schedule else None)
        with (
            briefly(),
            gpt_cases.built(one, schedule, 4) as (adapter, chunks),
            ExitStack() as stack,
        ):
            stack.enter_context(shared_out())
            if schedule is not None:
                stack.enter_context(hooked())
            found.append(Job(one, adapter, chunks).losses(folder, begins=not number))
    return found


QUICK = ("distributed-buckets",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        pytest.param(case, schedule, marks=() if (case in QUICK and schedule == "v-half") else FULL)
        for case in CASES
        for schedule in ("v-half", "v-zb", "wave")
        if schedule != "wave" or not CASES[case].layout  # a wave has eight stages
    ],
)
def test_a_v_saves_and_all_go_on_with_its_losses(
    ranks: RankPools, tmp_path: Path, case: str, schedule: str
) -> None:
    order: list[str | None] = [schedule, None, "v-min"]
    if CASES[case].layout:  # Megatron's own has other stages
        order = [schedule, "v-min"]
    trained = replace(CASES[case], layers=8) if schedule == "wave" else CASES[case]
    for found in ranks(4).run(losses, case=trained, schedules=order, folder=tmp_path):
        assert len(found[0]) == 16
        assert found == [found[0]] * len(found)
