"""State that forwards update: R reads what F has read, and leaves no update."""

from __future__ import annotations

import csv
import queue
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from changed_by_forwards import CASES, CASES_OF_TE, OF_TE, runs, values, values_of_te
from gpt_cases import GPTCase, built, forward_backward, gradients, microbatches, run
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.utils import unwrap_model
from model_options import EXPERTS
from project import ROOT
from ranks import RankPool, RankPools
from recompute_offload import with_recompute_offload
from user_changes import STATEFUL

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.forward_state import StatePart
from megatron_zb.runtime.autograd_stage import AutogradStage, WeightGradQueue
from megatron_zb.schedules import Schedule

M = 6
GLOBAL_LOSS = tuple({**EXPERTS, "moe_router_load_balancing_type": "global_aux_loss"}.items())
BIAS = (
    ("moe_router_enable_expert_bias", True),
    ("moe_router_score_function", "sigmoid"),
    ("moe_router_load_balancing_type", "seq_aux_loss"),
)
OF_MEGATRON = {
    "global loss": GPTCase(options=GLOBAL_LOSS),
    "expert bias": GPTCase(options=tuple({**EXPERTS, **dict(BIAS)}.items())),
    "prediction": GPTCase(multi_token=1, rotary=True),
}


def recomputed(name: str, seed: int = 6, **options: Any) -> tuple[Schedule, Schedule]:
    """An order, and the same one with R of a part of its units."""
    kept = schedules.build(name, pipeline_size=2, num_microbatches=M, **options)
    other = with_recompute_offload(kept, seed, recompute=0.6)
    assert other.recomputed
    return kept, other


def differing(case: GPTCase, orders: tuple[Schedule, Schedule]) -> list[str]:
    """Where two orders leave other losses or gradients after three steps: [] is nowhere."""
    one, other = (run(case, order, [M], iterations=3)[M] for order in orders)
    found = [] if one.losses == other.losses else [f"{one.losses} are not {other.losses}"]
    for name, gradient in one.gradients.items():
        if not torch.equal(gradient, other.gradients[name]):
            found.append(f"gradient of {name}")
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", ["v-half", pytest.param("interleaved", marks=pytest.mark.full)])
@pytest.mark.parametrize("state", [*STATEFUL, "global counter"])
def test_a_users_state_is_that_of_forwards_which_run_once(
    ranks: RankPools, state: str, name: str
) -> None:
    found = ranks(2).run(differing, case=GPTCase(changes=(state,)), orders=recomputed(name))
    assert found == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["v-half", pytest.param("zb-h1", marks=pytest.mark.full)])
@pytest.mark.parametrize("what", OF_MEGATRON)
def test_megatrons_state_is_that_of_forwards_which_run_once(
    ranks: RankPools, what: str, name: str
) -> None:
    found = ranks(2).run(differing, case=OF_MEGATRON[what], orders=recomputed(name))
    assert found == [[]] * 2


@pytest.mark.long
@pytest.mark.parametrize("what", ["global loss", "expert bias"])
@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        pytest.param(4, {"tensor_parallel": 2, "sequence_parallel": True}, id="tensor parallel"),
        pytest.param(2, {"tied": True}, id="tied"),
    ],
)
def test_routers_state_is_that_of_forwards_which_run_once_in_other_models(
    ranks: RankPools, world_size: int, more: dict[str, Any], what: str
) -> None:
    case = replace(OF_MEGATRON[what], **more)
    found = ranks(world_size).run(differing, case=case, orders=recomputed("v-half"))
    assert found == [[]] * world_size


def buffers_after_steps(case: GPTCase, order: Schedule) -> list[torch.Tensor]:
    """All buffers of a rank's chunks after two steps."""
    with built(case, order, M) as (adapter, chunks):
        assert adapter is not None
        for _ in range(2):
            data = [microbatches(case, M) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, M)
        return [b.clone() for chunk in chunks for b in torch.nn.Module.buffers(chunk)]


@pytest.mark.long
def test_what_routers_count_is_counted_once(ranks: RankPools) -> None:
    kept, other = recomputed("v-half")
    of_kept, of_other = (
        ranks(2).run(buffers_after_steps, case=OF_MEGATRON["expert bias"], order=order)
        for order in (kept, other)
    )
    for one, two in zip(of_kept, of_other, strict=True):
        assert any(buffer.any() for buffer in one)
        assert len(one) == len(two)
        assert all(map(torch.equal, one, two))


@pytest.mark.long
@pytest.mark.parametrize("what", ["global loss", "expert bias"])
def test_routers_count_the_same_with_a_sharded_output_layer(ranks: RankPools, what: str) -> None:
    case = OF_MEGATRON[what]
    whole, sharded = (
        ranks(2).run(values, case=replace(case, vocabulary=cuts), schedule="v-half", verifies=cuts)
        for cuts in (False, True)
    )
    for one, other in zip(whole, sharded, strict=True):
        buffers = {path: found for path, (change, found) in one.items() if change.kind == "buffer"}
        assert any(map(torch.any, buffers.values()))
        assert all(torch.equal(found, other[path][1]) for path, found in buffers.items())


def after_steps(
    case: GPTCase, order: Schedule, steps: range, folder: Path
) -> dict[str, torch.Tensor]:
    """Train from the checkpoint of the first step and save one of the last.

    Returns:
        Losses, buffers and gradients of this rank.
    """
    with built(case, order, M) as (adapter, chunks):
        assert adapter is not None
        models = unwrap_model(chunks)
        if steps.start:
            states = {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}
            loaded = dist_checkpointing.load(states, str(folder / str(steps.start)))
            for i, model in enumerate(models):
                model.load_state_dict(loaded[f"model{i}"], strict=False)
        for step in steps:
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [microbatches(case, M, step * M) for _ in chunks]
            records = forward_backward(adapter.forward_backward_func, chunks, data, M)
        states = {f"model{i}": model.sharded_state_dict() for i, model in enumerate(models)}
        (folder / str(steps.stop)).mkdir(exist_ok=True)
        torch.distributed.barrier()
        # for reports of its writers, Megatron would start a process that outlives this rank
        with mock.patch.object(filesystem_async, "_results_queue", queue.Queue()):
            dist_checkpointing.save(states, str(folder / str(steps.stop)))
        losses = {f"loss {i}": torch.as_tensor(r["lm loss"]) for i, r in enumerate(records)}
        buffers = {
            f"{i} {name}": buffer.clone()
            for i, model in enumerate(models)
            for name, buffer in model.named_buffers()
        }
        return {**losses, **buffers, **dict(gradients(chunks))}


@pytest.mark.long
@pytest.mark.parametrize("what", ["global loss", "expert bias"])
def test_a_run_resumed_in_the_middle_has_the_state_of_one_run(
    ranks: RankPools, tmp_path: Path, what: str
) -> None:
    kept, other = recomputed("v-half")
    train = partial(ranks(2).run, after_steps, case=OF_MEGATRON[what])
    (tmp_path / "whole").mkdir()
    whole = train(order=kept, steps=range(4), folder=tmp_path / "whole")
    train(order=other, steps=range(2), folder=tmp_path)
    resumed = train(order=other, steps=range(2, 4), folder=tmp_path)
    for expected, found in zip(whole, resumed, strict=True):
        assert expected.keys() == found.keys()
        assert [n for n, value in expected.items() if not torch.equal(value, found[n])] == []


def labels(case: GPTCase, order: Schedule) -> dict[str, bool]:
    """What forwards were seen to change, and whether it is recorded."""
    with built(case, order, M) as (adapter, chunks):
        assert adapter is not None
        for _ in range(2):
            data = [microbatches(case, M) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, M)
        states = adapter.part(StatePart).states.values()
        return {place.label: place.is_state for state in states for place in state.places}


def test_what_every_forward_sets_anew_is_not_recorded(ranks: RankPools) -> None:
    case = GPTCase(changes=("scratch", "new average"))
    of_rank, _ = ranks(2).run(labels, case=case, order=recomputed("v-half")[1])
    mlp = "decoder.layers.0.mlp"
    assert (of_rank[f"{mlp}.latest"], of_rank[f"{mlp}.average"]) == (False, True)


def listed(layers: str = "") -> set[tuple[str, str, str]]:
    """Module, name and kind of change of all rows of the table of docs/forward_state.md."""
    version = ".".join(map(str, versions.core_series()))
    path = ROOT / "docs" / "results" / "forward_state" / f"{version}{layers}.csv"
    if not path.exists():
        pytest.skip(f"the table has no megatron-core {version}")
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        kept = [row[feature] for feature in ("recomputation", "offload", "pairs", "verify")]
        assert "other" not in "/".join(kept), row
    return {(row["module"], row["attribute"], row["changed"]) for row in rows}


def test_the_table_has_what_routers_change(ranks: RankPools) -> None:
    """The table, made anew for one model, and none of it lost."""
    case, schedule, verifies = runs(CASES["global_aux_loss"])[""]
    for of_rank in ranks(2).run(values, case=case, schedule=schedule, verifies=verifies):
        found = {(change.owner, change.name, change.how) for change, _ in of_rank.values()}
        assert ("TopKRouter", "ga_steps", "updated in place") in found
        assert found <= listed()


def test_the_table_has_what_layers_of_transformer_engine_change(te_pool: RankPool) -> None:
    case, schedule, verifies = runs(CASES_OF_TE["fp8 delayed"])[""]
    for of_rank in te_pool.run(values_of_te, case=case, schedule=schedule, verifies=verifies):
        found = {(change.owner, change.name, change.how) for change, _ in of_rank.values()}
        assert ("DelayedScalingRecipeState", "amax_history", "updated in place") in found
        assert found <= listed(OF_TE)


def refusal_of_first_step(case: GPTCase) -> str:
    with built(case, "zb-h1", 2) as (adapter, chunks):
        assert adapter is not None
        data = [microbatches(case, 2) for _ in chunks]
        try:
            forward_backward(adapter.forward_backward_func, chunks, data, 2)
        except UsageError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ("running average", "decoder.layers.0.mlp.average"),
        ("new average", "decoder.layers.0.mlp.average"),
        ("object with state", "a hook of decoder.layers.0.mlp.tracker.total"),
        ("scratch", None),
        ("cache", None),
    ],
)
def test_a_users_state_is_refused_with_slices(
    ranks: RankPools, state: str, name: str | None
) -> None:
    found = ranks(2).run(refusal_of_first_step, case=GPTCase(changes=(state,), slices="2"))
    expected = "" if name is None else f"--pipeline-slices: forwards update {name}, which would be"
    assert [one[: len(expected)] if expected else one for one in found] == [expected] * 2


def test_a_forward_that_computes_gradients_itself_cannot_be_recomputed() -> None:
    def compute(microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        assert activation is not None
        (slope,) = torch.autograd.grad(activation.exp().sum(), activation, create_graph=True)
        return activation + slope

    stage = AutogradStage(compute, WeightGradQueue(), is_last=False)
    stage.recomputed = [0]
    with pytest.raises(UsageError, match=r"computes gradients itself.*leave the flag out"):
        stage.forward(0, torch.ones(2))
