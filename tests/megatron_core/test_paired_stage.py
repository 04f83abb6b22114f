"""Pairs of a forward and a backward: losses and gradients are those of upstream without pairs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import te_models
import torch
from gpt_cases import (
    GPTCase,
    built,
    differences,
    forward_backward,
    gradients,
    microbatches,
)
from joined_pairs import dropping, joined
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.utils import unwrap_model
from model_options import EXPERTS, LATENT
from rank_process import Kind
from ranks import RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm.models import check_model
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.families import dualpipe_v_order
from megatron_zb.schedules.passes import PassKind


def case(more: dict[str, Any] | None = None, **options: Any) -> GPTCase:
    usual = GPTCase(
        dtype="bfloat16",
        data_parallel=2,
        expert_parallel=2,
        layers=8,
        all_to_all_overlaps=True,
        options=tuple((EXPERTS | (more or {})).items()),
    )
    return replace(usual, **options)


def order(name: str, num_microbatches: int = 5) -> Schedule:
    if name == "published dualpipe-v":
        return dualpipe_v_order(2, num_microbatches)
    built = schedules.build(name, pipeline_size=2, num_microbatches=num_microbatches)
    return joined(built)


# Megatron keeps the aux losses of all models of a process in one tensor, one for each layer.
PREDICTION = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0}
CASES = {
    "aux_loss": case(),
    "shared_expert": case({"moe_shared_expert_intermediate_size": 32}),
    "tied": case(tied=True),
    "no_tokens": case({"num_moe_experts": 32}, layers=4),
    "one_expert_on_a_rank": case(
        {"num_moe_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True}
    ),
    "dense_first_layers": case({"moe_layer_freq": (0, 0, 0, 1, 1, 1, 1, 1)}),
    "uneven_stages": case(layout="Et|ttt|tt|ttL"),
    "overlapped_reduction": case(overlap_grad_reduce=True),
    "distributed_optimizer": case(
        overlap_grad_reduce=True,
        distributed_optimizer=True,
        overlap_param_gather=True,
        optimizer_steps=3,
    ),
    "fused_accumulation": case(fused_accumulation=True, overlap_grad_reduce=True),
    "float16": case(dtype="float16", grad_scale=1024.0),
    "per-token_loss": case(per_token_loss=True),
    "no_ddp": case(wrapped=False),
    "lengths": case(lengths=(16, 8, 12)),
    "latent_attention": case(dict(LATENT)),
    "rope-swiglu": case(
        {"num_query_groups": 2, "gated_linear_unit": True, "normalization": "RMSNorm"}, rotary=True
    ),
    "selective_recomputation": case(
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}
    ),
    "early_release": case({"ep_overlap_early_attn_memory_release": True}),
    "multi-token_prediction": case(PREDICTION, multi_token=1, rotary=True),
}
NAMES = ("v-half", "v-zb", "interleaved", "published dualpipe-v")
IN_EVERY_RUN = {("shared_expert", "v-half"), ("overlapped_reduction", "interleaved")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(what, name, marks=() if (what, name) in IN_EVERY_RUN else pytest.mark.full)
        for what in CASES
        for name in NAMES
    ],
)
def test_pairs_compute_what_megatron_computes(ranks: RankPools, what: str, name: str) -> None:
    schedule = order(name)
    assert schedule.pairs
    found = ranks(4).run(
        differences, case=CASES[what], schedule=schedule, num_microbatches=[5], iterations=2
    )
    assert found == [[]] * 4


@pytest.mark.long
def test_of_a_tied_embedding_with_prediction_only_the_rounding_of_a_sum_differs(
    ranks: RankPools,
) -> None:
    """Plans add the lookup's part and the output layer's one by one, and round neither's sum."""
    tied = case(PREDICTION, multi_token=1, rotary=True, tied=True)
    found = ranks(4).run(differences, case=tied, schedule=order("v-half"), num_microbatches=[5])
    texts = [text for rank in found for text in rank]
    assert texts
    for text in texts:
        assert "gradient of embedding.word_embeddings.weight is off by" in text
        assert float(text.split()[-1]) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name"),
    [
        pytest.param(
            what, name, marks=() if (what, name) == ("aux_loss", "v-half") else pytest.mark.full
        )
        for what in ("aux_loss", "shared_expert", "lengths", "selective_recomputation")
        for name in NAMES
    ],
)
def test_what_is_made_again_beside_pairs_is_what_megatron_computes(
    ranks: RankPools, what: str, name: str
) -> None:
    """Units in pairs are among those that are recomputed: by F, by backward, or both."""
    schedule = dropping(order(name))
    held = {forward[1:] for forward in schedule.pairs}
    pairs = (schedule.pair_at(r, i) for r, of in enumerate(schedule.ranks) for i in range(len(of)))
    assert held & schedule.recomputed
    assert {pair.backward[1:] for pair in pairs if pair is not None} & schedule.recomputed
    found = ranks(4).run(
        differences, case=CASES[what], schedule=schedule, num_microbatches=[5], iterations=2
    )
    assert found == [[]] * 4


def _with_dropout(schedule: Schedule) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of a step whose layers draw dropout masks from streams of their own."""
    drawing = case(dropout=0.1, layers=4)
    m = schedule.num_microbatches
    with built(drawing, schedule, m, steps_done=lambda: 3) as (adapter, chunks):
        assert adapter is not None
        data = [microbatches(drawing, m) for _ in chunks]
        records = forward_backward(adapter.forward_backward_func, chunks, data, m)
        return [float(record["lm loss"]) for record in records], dict(gradients(chunks))


def differences_with_dropout(schedule: Schedule) -> list[str]:
    others = schedule.without_pairs()
    kept = tuple(tuple(p for p in rank if p.kind is not PassKind.R) for rank in others.ranks)
    with_pairs, without = map(_with_dropout, (schedule, replace(others, ranks=kept)))
    found = [] if with_pairs[0] == without[0] else [f"losses {with_pairs[0]}, not {without[0]}"]
    return found + [n for n, g in without[1].items() if not torch.equal(g, with_pairs[1][n])]


@pytest.mark.long
@pytest.mark.parametrize("drops", [True, pytest.param(False, marks=pytest.mark.full)])
def test_layers_draw_the_same_masks_in_pairs(ranks: RankPools, drops: bool) -> None:
    """Of the microbatch that they run, from where their last part has stopped, and again in R."""
    schedule = order("v-half")
    schedule = dropping(schedule) if drops else schedule
    assert ranks(4).run(differences_with_dropout, schedule=schedule) == [[]] * 4


@pytest.mark.full
def test_layers_of_transformer_engine_compute_the_same_in_pairs(ranks: RankPools) -> None:
    """Over stand-ins for its kernels."""
    found = ranks(4, Kind.TRANSFORMER_ENGINE).run(
        te_models.differences,
        case=replace(case(), layers=4),
        schedule=order("v-half"),
        microbatches=[5],
    )
    assert found == [[]] * 4


def steps_with_an_evaluation(schedule: Schedule) -> list[Any]:
    """Runs of plans in a step, in an evaluation and in a step again; and what differs in these."""
    runs: list[tuple[bool, bool]] = []
    usual = TransformerModelChunkSchedulePlan.run

    def counted(forward: Any, backward: Any, **more: Any) -> Any:
        runs.append((forward is not None, backward is not None))
        return usual(forward, backward, **more)

    training, m = case(layers=4), schedule.num_microbatches
    outcomes = []
    with (
        patch.object(TransformerModelChunkSchedulePlan, "run", staticmethod(counted)),
        built(training, schedule, m) as (adapter, chunks),
    ):
        assert adapter is not None
        for forward_only in (False, True, False):
            runs.clear()
            for chunk in chunks:
                chunk.zero_grad_buffer()
            records = forward_backward(
                adapter.forward_backward_func,
                chunks,
                [microbatches(training, m) for _ in chunks],
                m,
                forward_only=forward_only,
            )
            losses = [float(record["lm loss"]) for record in records]
            outcomes.append((losses, {n: g.clone() for n, g in gradients(chunks)}, Counter(runs)))
    (first, evaluated, again) = outcomes
    different = [n for n, g in first[1].items() if not torch.equal(g, again[1][n])]
    if not first[0] == evaluated[0] == again[0]:
        different.append("losses")
    return [first[2], evaluated[2], again[2], different]


def test_pairs_run_together_and_evaluations_without_plans(ranks: RankPools) -> None:
    schedule = order("v-half")
    found = ranks(4).run(steps_with_an_evaluation, schedule=schedule)
    both, forward, backward = (True, True), (True, False), (False, True)
    for rank, counted in enumerate(found):
        logical = 1 - rank // 2  # a V is laid in mirror image
        pairs = sum(p in schedule.pairs for p in schedule.ranks[logical])
        alone = 2 * schedule.num_microbatches - pairs
        expected = Counter({both: pairs, forward: alone, backward: alone})
        assert counted == [expected, Counter(), expected, []]


def refused_step(schedule: Schedule) -> str:
    """Say what a step answers whose forward step knows no plans."""

    def own_step(iterator: Any, model: Any) -> Any:
        raise AssertionError("it is not called")

    with built(case(layers=4), schedule, schedule.num_microbatches) as (adapter, chunks):
        assert adapter is not None
        function = adapter.forward_backward_func
        with pytest.raises(UsageError) as refused:
            forward_backward(function, chunks, [None, None], schedule.num_microbatches, own_step)
        return str(refused.value)


def refused_models(schedule: Schedule) -> list[str]:
    """Say what is answered to models that Megatron's plans would not compute."""
    dense = case({"moe_layer_freq": (1, 1, 1, 0)}, layers=4)
    said = []
    for wrong in (dense, case(layers=4, frozen="router"), case(layers=4)):
        with built(wrong, schedule, schedule.num_microbatches) as (_, chunks):
            for chunk in unwrap_model(chunks):
                try:
                    check_model(chunk, "v-half", in_a_v=True, draws_by_layer=False)
                except UsageError as error:
                    said.append(str(error))
    return said


def test_what_plans_cannot_compute_is_refused(ranks: RankPools) -> None:
    schedule = order("v-half")
    flag = "--overlap-moe-expert-parallel-comm"
    said = ranks(4).run(refused_step, schedule=schedule)
    assert set(said) == {
        f"{flag} needs a forward step that takes return_schedule_plan, as that of "
        "pretrain_gpt.py does: leave the flag out for this script"
    }
    for rank, said in enumerate(ranks(4).run(refused_models, schedule=schedule)):
        norms = [text for text in said if "leave the final norm out" in text]
        frozen = [text for text in said if "router.weight: Megatron's plans want a grad" in text]
        assert len(norms) == (rank >= 2) and len(frozen) == 2
        assert len(norms) + len(frozen) == len(said)
        assert all(text.startswith(f"{flag} cannot run a model ") for text in said)
