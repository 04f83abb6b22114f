"""What is switched on for a step is off after it, also where the step has raised an exception."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import RankPools

from megatron_zb.measured.profile import read_profile
from megatron_zb.megatron_core import forward_backward as runtime
from megatron_zb.megatron_core.connections import WatchPart
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.profiling import TIMED, WARM_UP, WHOLE
from megatron_zb.megatron_core.random_streams import LayerStreams

CASE, M = GPTCase(), 4
MARKED, COUNTED = WARM_UP, WARM_UP + TIMED + WHOLE
"""The first step of a profile in which hooks are set, and that in which bytes are counted."""
STEPS = COUNTED + 4


def hooks(chunks: list[Any]) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(m, kind)) for c in chunks for m in c.modules() for kind in kinds)


def left_on(adapter: Any, chunks: list[Any]) -> dict[str, Any]:
    """What a step may have left switched on, by name."""
    function = adapter.forward_backward_func
    measures = ProfilePart in adapter._parts
    profiling = adapter.part(ProfilePart).profiling if measures else None
    return {
        "counter": function._memory,
        "observers": profiling.observers if profiling is not None else (),
        "marks": [split.queue.on_task for split in adapter._splits],
        "hooks": hooks(chunks),
        "in a step": adapter.part(WatchPart).progress.in_step,
    }


class Broken(Exception):
    """What a step raises."""


def steps(path: Path | None, broken: set[int]) -> tuple[list[list[float]], list[dict[str, Any]]]:
    """Losses of the steps that end, and what each step leaves on; some raise in the middle."""
    found, left = [], []
    with built(CASE, "v-half", M) as (adapter, chunks):
        assert adapter is not None
        if path is not None:
            adapter.profile(path, None)
        usual = left_on(adapter, chunks)
        for step in range(STEPS):
            data = [microbatches(CASE, M) for _ in chunks]

            def train(data: list[Any] = data) -> list[Any]:
                return forward_backward(adapter.forward_backward_func, chunks, data, M)

            if step in broken:
                with (
                    patch.object(runtime, "run_program", side_effect=Broken),
                    pytest.raises(Broken),
                ):
                    train()
            else:
                found.append([float(record["lm loss"]) for record in train()])
            now = left_on(adapter, chunks)
            left.append({what: value for what, value in now.items() if value != usual[what]})
    return found, left


@pytest.mark.slow
def test_a_step_leaves_nothing_switched_on_and_one_that_raises_is_measured_again(
    ranks: RankPools, tmp_path: Path
) -> None:
    """Where hooks are set, in the middle of the steps that are timed, and where bytes are counted.

    The second and the third number count the steps that have been broken before.
    """
    path = tmp_path / "profile.yaml"
    broken = {MARKED, MARKED + 3, COUNTED + 2}
    plain = ranks(2).run(steps, path=None, broken=set())
    measured = ranks(2).run(steps, path=path, broken=broken)
    for (losses, _), (others, left) in zip(plain, measured, strict=True):
        assert left == [{}] * STEPS
        assert others == losses[len(broken) :]
    assert any(losses for losses, _ in plain)
    assert [stage.layers for stage in read_profile(path).stages] == ["Et", "t", "t", "tL"]


def repeated_calls() -> tuple[list[float], ...]:
    """Numbers of a layer that runs twice in a pass, of two passes, and of the first one again."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    streams = LayerStreams(1)
    streams._learn_origins()
    streams.start_step(3)

    def of_pass(microbatch: int) -> list[float]:
        streams.start_pass(microbatch)
        return [streams._forward("layer", torch.rand, 1).item() for _ in range(2)]

    return of_pass(0), of_pass(1), of_pass(0)


def test_a_layer_that_runs_twice_draws_twice_and_the_same_when_its_pass_is_repeated(
    ranks: RankPools,
) -> None:
    [(first, second, again)] = ranks(1).run(repeated_calls)
    assert len({*first, *second}) == 4
    assert again == first
