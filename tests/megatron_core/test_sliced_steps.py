"""Token slices in Megatron's models: the same for all schedules, and Megatron's up to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import gpt_cases
import pytest
import torch
from drawn_sizes import every_value
from gpt_cases import (
    GPTCase,
    Outcome,
    as_hybrid,
    built,
    forward_backward,
    microbatches,
    run,
    skip_without_hybrids,
)
from megatron.core import parallel_state
from model_options import GATED_DELTA, LATENT, MAMBA, RECOMPUTED, ROUTED, SELECTIVE
from ranks import RankFailure, RankPools

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.adapter import JobSizes, PipelineAdapter, ScheduleSettings
from megatron_zb.megatron_core.sliced_documents import Cut, starts_of
from megatron_zb.megatron_core.sliced_loss import TokenCounts
from megatron_zb.megatron_core.sliced_reading import ReadingOptions, SlicedReading
from megatron_zb.megatron_core.stages import OffloadPart
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.features.slices import Slicing
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import Placement

MICROBATCHES = 3
PLAIN = GPTCase(layers=4, exact=True)
CASES = {
    "plain": PLAIN,
    "tied": replace(PLAIN, tied=True),
    "grouped queries, rotary": replace(
        PLAIN, rotary=True, options=(("num_query_groups", 2), ("gated_linear_unit", True))
    ),
    "per-token loss": replace(PLAIN, per_token_loss=True),
    "full recomputation": replace(
        PLAIN,
        options=RECOMPUTED,
    ),
    "recomputed attention": replace(
        PLAIN,
        options=SELECTIVE,
    ),
    "latent attention": replace(PLAIN, options=LATENT),
    "sequence parallelism": replace(PLAIN, tensor_parallel=2, sequence_parallel=True),
    "documents by a mask": replace(PLAIN, documents="mask", rotary=True),
    "packed documents, grouped queries, recomputation": replace(
        PLAIN,
        documents="ends",
        tensor_parallel=2,
        options=(
            ("num_query_groups", 2),
            ("recompute_granularity", "selective"),
            ("recompute_modules", ("core_attn",)),
        ),
    ),
    "overlapped reduction": replace(PLAIN, data_parallel=2, overlap_grad_reduce=True),
    "context parallelism": replace(
        PLAIN, context_parallel=2, rotary=True, options=(("num_query_groups", 2),)
    ),
}
HYBRIDS = {
    "tied, rotary, full recomputation": replace(
        PLAIN, tied=True, rotary=True, options=CASES["full recomputation"].options
    ),
    "experts": replace(PLAIN, options=tuple(ROUTED.items())),
    "latent attention": replace(PLAIN, options=LATENT),
    "documents, per-token loss": replace(PLAIN, documents="ends", per_token_loss=True),
    "sequence parallelism": CASES["sequence parallelism"],
    "context parallelism": replace(PLAIN, context_parallel=2, rotary=True),
}
"""Cases whose layers are tried as a pattern."""
_SHARED = replace(PLAIN, context_parallel=2, rotary=True)
SHARED = {
    "evaluated": _SHARED,
    "per-token loss": replace(_SHARED, per_token_loss=True),
    "latent attention": replace(_SHARED, rotary=False, options=LATENT),
    "full recomputation": replace(_SHARED, options=CASES["full recomputation"].options),
    "packed documents": replace(_SHARED, documents="ends"),
    "sequence parallelism": replace(_SHARED, tensor_parallel=2, sequence_parallel=True),
    "overlapped reduction": replace(_SHARED, overlap_grad_reduce=True, tied=True),
    "experts": replace(_SHARED, options=(*ROUTED.items(), ("moe_z_loss_coeff", 0.01))),
}
"""Cases whose slices two ranks share."""
USUAL = ((2, "2", "1f1b"), (2, "4", "v-half"), (2, "8", "auto"))
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb", "auto")


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in units of the largest number."""
    scale = float(expected.abs().max())
    return float((found - expected).abs().max()) / (scale or 1.0)


def means(iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """A forward step whose loss is a part of the mean over the tokens that ranks share."""
    output, sums = STEP(iterator, model)

    def mean(losses: torch.Tensor) -> tuple[Any, Any]:
        total, tokens, record = sums(losses)
        torch.distributed.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
        return total / tokens, {"lm loss": record["lm loss"].nan_to_num()}

    return output, mean


STEP = gpt_cases._forward_step


def distance(case: GPTCase, name: str, slices: str, forward_only: bool) -> float:
    """How far a sliced step is from Megatron's own, in units of the largest number of a tensor.

    Megatron's has sequences that no ranks share.
    """
    whole = replace(case, context_parallel=1)
    (expected,) = gpt_cases._references(whole, [MICROBATCHES], forward_only)
    sliced = replace(case, slices=slices)
    found = run(sliced, name, [MICROBATCHES], forward_only, iterations=2)[MICROBATCHES]
    assert len(found.losses) in (0, MICROBATCHES)
    mean = torch.tensor(found.losses, dtype=torch.float64) / case.context_parallel
    torch.distributed.all_reduce(mean, group=parallel_state.get_context_parallel_group())
    losses = [abs(a / b - 1) for a, b in zip(mean.tolist(), expected.losses, strict=False)]
    shared = found.gradients.keys() & expected.gradients.keys()
    assert shared or forward_only
    return max([*losses, *(off(found.gradients[n], expected.gradients[n]) for n in shared)] or [0])


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), every_value([*CASES], SCHEDULES))
def test_a_sliced_step_is_megatrons_up_to_rounding(ranks: RankPools, what: str, name: str) -> None:
    case = CASES[what]
    size = 2 * case.tensor_parallel * case.context_parallel * case.data_parallel
    found = ranks(size).run(distance, case=case, name=name, slices="4", forward_only=False)
    assert max(found) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "zb-h2", "zb-1p", "zb-2p", "1f1b-v", "wave"])
def test_every_schedule_that_has_slices_trains(ranks: RankPools, name: str) -> None:
    case = replace(PLAIN, layers=8)
    found = ranks(2).run(distance, case=case, name=name, slices="4", forward_only=False)
    assert max(found) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), every_value([*HYBRIDS], ["1f1b", "v-half", "auto"]))
def test_a_hybrid_model_is_cut_as_a_gpt(ranks: RankPools, what: str, name: str) -> None:
    case = as_hybrid(HYBRIDS[what])
    skip_without_hybrids(case)
    size = 2 * case.tensor_parallel * case.context_parallel
    for forward_only in (False, True):
        found = ranks(size).run(
            distance, case=case, name=name, slices="4", forward_only=forward_only
        )
        assert max(found) < 1e-12


@pytest.mark.parametrize(("pattern", "layer"), [("*-M-", "MambaMixer"), ("*-G-", "GatedDeltaNet")])
def test_a_layer_with_a_state_is_refused_by_name(
    ranks: RankPools, pattern: str, layer: str
) -> None:
    options = MAMBA if "M" in pattern[1:3] else GATED_DELTA
    case = GPTCase(hybrid=pattern, layers=4, slices="4", options=options)
    skip_without_hybrids(case)
    with pytest.raises(RankFailure, match=f"UsageError: --pipeline-slices .*, not {layer}: leave"):
        ranks(2).run(run, case=case, schedule="v-half", num_microbatches=[3])


@pytest.mark.full
@pytest.mark.parametrize(("what", "name"), every_value([*SHARED], ["1f1b", "v-half", "auto"]))
def test_shared_slices_are_those_of_one_rank_up_to_rounding(
    ranks: RankPools, what: str, name: str
) -> None:
    case, most = SHARED[what], 1e-12
    if what == "packed documents":  # the rotary tables of 32 bits start anew in each of them
        most = 1e-8
    pool = ranks(4 * case.tensor_parallel)
    found = pool.run(distance, case=case, name=name, slices="8,4,4", forward_only=False)
    assert max(found) < most
    if what == "evaluated":
        found = pool.run(distance, case=case, name=name, slices="4", forward_only=True)
        assert max(found) < most


@pytest.mark.parametrize("slices", ["8,6,2", "2"])
def test_an_evaluation_and_unequal_slices(ranks: RankPools, slices: str) -> None:
    for forward_only in (False, True):
        found = ranks(2).run(
            distance, case=PLAIN, name="v-half", slices=slices, forward_only=forward_only
        )
        assert max(found) < 1e-12


def of_means(case: GPTCase) -> float:
    """How far gradients are from Megatron's if the loss is a mean."""
    whole = replace(case, context_parallel=1, slices=None)
    (expected,) = gpt_cases._references(whole, [MICROBATCHES], False)
    with patch.object(gpt_cases, "_forward_step", means):
        found = run(case, "v-half", [MICROBATCHES])[MICROBATCHES]
    return max(off(value, expected.gradients[n]) for n, value in found.gradients.items())


@pytest.mark.full
@pytest.mark.parametrize("shared", [False, True])
def test_a_mean_is_weighed_by_the_tokens_of_its_slice(ranks: RankPools, shared: bool) -> None:
    case = replace(SHARED["evaluated"] if shared else PLAIN, slices="4")
    assert max(ranks(4 if shared else 2).run(of_means, case=case)) < 1e-12


def test_documents_start_where_the_data_ends_them() -> None:
    ends = torch.tensor([[0, 3, 5, 8, 8], [0, 7, 7, 7, 7]], dtype=torch.int32)
    found = [[0, 0, 0, 3, 3, 5, 5, 5], [0, 0, 0, 0, 0, 0, 0, 7]]
    assert starts_of({"cu_seqlens": ends}, 8).tolist() == found
    padded = {"cu_seqlens": torch.tensor([[0, 2, 4]]), "cu_seqlens_padded": ends[:1]}
    assert starts_of(padded, 8).tolist() == found[:1]
    places = torch.tensor([[0, 3, 5, 8, 8, -1, -1]])
    for names in ({"cu_seqlens": places}, {"cu_seqlens_q": places[0]}):
        more = {"cu_seqlens_unpadded": ends[1:], "cu_seqlens_kv": ends[1:]}
        assert starts_of(more | names, 8).tolist() == found[:1]
    logical = {"cu_seqlens_q": ends[1:], "cu_seqlens_q_padded": ends[:1]}
    assert starts_of(logical, 8).tolist() == found[:1]
    starts = torch.tensor(found)
    within = (torch.arange(8) >= starts[..., None]) & torch.ones(8, 8).tril().bool()
    assert starts_of({"attention_mask": ~within[:, None]}, 8).tolist() == found
    with pytest.raises(UsageError, match="neither cu_seqlens nor attention_mask"):
        starts_of({"tokens": ends}, 8)


def test_packed_samples_are_looked_at_and_then_cut() -> None:
    tokens, ends = torch.arange(8)[None], torch.tensor([[0, 3, 8, 8]])
    more = {"max_seqlen_q": torch.tensor([[5]]), "token_count": [8], "attention_mask": None}
    samples = [{"tokens": tokens + n, "cu_seqlens_q": ends, **more} for n in range(2)]
    reading = SlicedReading(iter(samples), (0, 4, 8))
    assert reading.finds_ends()
    reading.options.has_documents = True
    starts = [one.tolist() for one in reading.read_ahead(2).values()]
    assert starts == [[[0, 0, 0, 3, 3, 3, 3, 3]]] * 2
    cut = [*reading]
    assert [one.keys() for one in cut] == [{"tokens"}] * 4
    assert torch.cat([one["tokens"] for one in cut], dim=1).tolist() == [[*range(8), *range(1, 9)]]
    assert not SlicedReading(iter([{"tokens": tokens}]), (0, 8)).finds_ends()


def test_an_iterator_that_is_cut_has_the_attributes_of_the_users() -> None:
    class Batches(Iterator[Any]):
        rerun_data_iterator = "replays"

        def __next__(self) -> Any:
            return {"tokens": torch.arange(8)[None]}

    reading = SlicedReading(Batches(), (0, 4, 8))
    assert reading.rerun_data_iterator == "replays"
    with pytest.raises(AttributeError):
        _ = reading.nothing


def test_slices_with_a_sharded_vocabulary_need_a_loss_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{TokenCounts.__module__}.device", lambda: torch.device("cpu"))
    step: Any = SimpleNamespace(pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)))
    sample = {"tokens": torch.arange(8)[None], "loss_mask": torch.tensor([[1.0] * 3 + [0.0] * 5])}
    data = iter([sample, {"tokens": sample["tokens"]}])
    reading = SlicedReading(data, (0, 4, 8), ReadingOptions(keeps_whole=True))
    for _ in range(3):  # two of the first microbatch, one of the next
        next(reading)
    counts = TokenCounts(reading, Cut((0, 4, 8)), step)
    assert [int(count) for count in counts.of(0)] == [3, 3, 3]
    with pytest.raises(UsageError, match="tokens in loss_mask, which the data does not have: add"):
        counts.of(2)


def test_samples_of_a_blend_are_cut() -> None:
    tokens = torch.arange(16).view(2, 8)
    whole = [{"tokens": tokens, "dataset_id": torch.tensor([0, 1]), "metadata": [{}, {}]}]
    cut = [*SlicedReading(iter(whole), (0, 6, 8))]
    assert [one.keys() for one in cut] == [{"tokens"}] * 2
    assert torch.equal(torch.cat([one["tokens"] for one in cut], dim=1), tokens)
    causal = torch.ones(2, 1, 8, 8).triu(1).bool()
    sample = {"tokens": tokens, "attention_mask": causal}
    assert [one.keys() for one in SlicedReading(iter([sample]), (0, 6, 8))] == [{"tokens"}] * 2
    causal[1, 0, 5:, :5] = True  # a document from token 5 on
    with pytest.raises(UsageError, match="attention_mask of a microbatch keeps attention within"):
        next(SlicedReading(iter([sample]), (0, 6, 8)))
    with pytest.raises(UsageError, match="cu_seqlens of a microbatch has no axis of 8 tokens"):
        next(SlicedReading(iter([{"cu_seqlens": tokens[:, :3]}]), (0, 6, 8)))


class Watched:
    """A user's context manager that keeps the exceptions which leave it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: object) -> None:
        self.seen.append(kind)


def left_by_a_refusal(case: GPTCase) -> list[Any]:
    """What leaves the user's context manager where the second microbatch is refused."""
    watched = Watched()

    def step(iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
        with watched:
            return STEP(iterator, model)

    with built(case, "1f1b", MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        batches = [*microbatches(case, MICROBATCHES)]
        batches[1]["tokens"] = batches[1]["tokens"][:, :3]
        try:
            function = adapter.forward_backward_func
            forward_backward(function, chunks, [iter(batches)], MICROBATCHES, step=step)
        except UsageError as error:
            assert "tokens of a microbatch has no axis of" in str(error)
            raise AssertionError(f"left by {watched.seen}") from error
    return []


def test_a_refusal_of_data_leaves_no_context_manager_of_the_user(ranks: RankPools) -> None:
    """Both slices of the first microbatch run."""
    with pytest.raises(RankFailure, match=r"AssertionError: left by \[None, None\]"):
        ranks(2).run(left_by_a_refusal, case=replace(PLAIN, slices="2"))


def test_a_microbatch_is_checked_once_and_its_end_is_left_to_the_step() -> None:
    tokens = torch.arange(8)[None]
    reading = SlicedReading(iter([{"tokens": tokens}]), (0, 4, 8))
    for unit in (0, 0, 1):
        reading.check_next(unit)
    assert [next(reading)["tokens"].tolist() for _ in range(2)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    reading.check_next(2)
    with pytest.raises(StopIteration):
        next(reading)


def outcomes(case: GPTCase, name: str) -> Outcome:
    return run(case, name, [MICROBATCHES], iterations=2)[MICROBATCHES]


def one_by_one(_name: str, *, slices: Slicing, **_others: Any) -> Schedule:
    """Return the order of one rank that has all layers: all F of a microbatch, then all B."""
    cut = schedules.build("1f1b", pipeline_size=2, num_microbatches=MICROBATCHES, slices=slices)
    units = [range(slices.slices * j, slices.slices * (j + 1)) for j in range(MICROBATCHES)]
    order = [
        Pass(kind, 0, unit)
        for of_microbatch in units
        for kind, places in ((PassKind.F, of_microbatch), (PassKind.BW, reversed(of_microbatch)))
        for unit in places
    ]
    one_stage = Placement("one rank", 1, (0,))
    return replace(cut, placement=one_stage, ranks=(tuple(order),)).validate()


def with_recompute_offload(name: str, **request: Any) -> Schedule:
    """A schedule in which a third of the slices are recomputed, and a third are offloaded."""
    order = schedules.build(name, **request)
    backward = (PassKind.B, PassKind.BW)

    def passes(rank: tuple[Pass, ...]) -> Iterator[Pass]:
        for p in rank:
            third = (p.stage + p.microbatch) % 3
            if p.kind in backward and third:
                yield p._replace(kind=PassKind.R if third == 1 else PassKind.H)
            yield p
            if p.kind is PassKind.F and third == 2:
                yield p._replace(kind=PassKind.D)

    return replace(order, ranks=tuple(tuple(passes(rank)) for rank in order.ranks)).validate()


def stated(case: GPTCase, name: str) -> Outcome:
    create = partial(PipelineAdapter.create, build=with_recompute_offload)
    with patch.object(PipelineAdapter, "create", create):
        return outcomes(case, name)


STATED = {
    "plain": GPTCase(layers=4, rotary=True),
    "grouped queries": GPTCase(
        layers=4, dtype="bfloat16", tied=True, options=(("num_query_groups", 2),)
    ),
    "latent attention": GPTCase(layers=4, options=LATENT),
    "packed documents": GPTCase(layers=4, documents="ends", rotary=True),
    "per-token loss": GPTCase(layers=4, per_token_loss=True, wrapped=True),
    "experts": GPTCase(layers=4, options=(*ROUTED.items(), ("moe_z_loss_coeff", 0.01))),
    "sequence parallelism": GPTCase(layers=4, tensor_parallel=2, sequence_parallel=True),
    "overlapped reduction": GPTCase(layers=4, data_parallel=2, overlap_grad_reduce=True),
    "context parallelism": GPTCase(layers=4, context_parallel=2, rotary=True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "name"), every_value([*STATED], ["v-half", "zb-h1", "1f1b"]))
def test_recomputed_and_offloaded_slices_are_as_those_that_are_kept(
    ranks: RankPools, what: str, name: str
) -> None:
    """To the last bit."""
    case = replace(STATED[what], slices="4")
    size = 2 * case.tensor_parallel * case.context_parallel * case.data_parallel
    kept, found = (ranks(size).run(way, case=case, name=name) for way in (outcomes, stated))
    for ours, expected in zip(found, kept, strict=True):
        assert ours.losses == expected.losses
        assert ours.gradients.keys() == expected.gradients.keys()
        for key, tensor in ours.gradients.items():
            assert torch.equal(tensor, expected.gradients[key]), key


def bytes_held(case: GPTCase, states: str) -> tuple[int, int]:
    """Peaks of a step on this rank, of its device and of its host, in bytes."""
    create = partial(PipelineAdapter.create, build=partial(all_in_state, states))
    patched = patch.object(PipelineAdapter, "create", create)
    with patched, built(case, "1f1b", MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
        adapter.track(memory)
        data = [microbatches(case, MICROBATCHES) for _ in chunks]
        with memory.watching():
            forward_backward(adapter.forward_backward_func, chunks, data, MICROBATCHES)
        return memory.peak_bytes, adapter.part(OffloadPart).peak_host_bytes


def all_in_state(states: str, name: str, **request: Any) -> Schedule:
    """A schedule in which every slice of the first stage is recomputed, offloaded, or kept."""
    order = schedules.build(name, **request)
    first, *others = order.ranks
    made: list[Pass] = []
    for p in first:
        if p.kind is PassKind.BW and states:
            made.append(p._replace(kind=PassKind(states[-1])))
        made.append(p)
        if p.kind is PassKind.F and states == "DH":
            made.append(p._replace(kind=PassKind.D))
    return replace(order, ranks=(tuple(made), *others)).validate()


def test_what_is_recomputed_or_offloaded_frees_the_device(ranks: RankPools) -> None:
    """All but inputs, keys and values, and the slice whose B comes next.

    The last stage keeps all.
    """
    case = GPTCase(layers=4, slices="4", rotary=True)
    kept, recomputed, offloaded = (
        ranks(2).run(bytes_held, case=case, states=states) for states in ("", "R", "DH")
    )
    (whole, nothing), _ = kept
    assert nothing == 0
    assert recomputed[0][0] < 0.3 * whole
    assert recomputed[0][1] == 0
    assert offloaded[0][0] < 0.2 * whole
    assert whole - offloaded[0][0] < offloaded[0][1] < 1.1 * whole
    # masks of attention are cached from one step to the next
    for states in (recomputed, offloaded):
        assert states[1] == (pytest.approx(kept[1][0], rel=0.02), 0)


def on_one_rank(case: GPTCase) -> Outcome:
    create = partial(PipelineAdapter.create, build=one_by_one)
    with patch.object(PipelineAdapter, "create", create):
        return outcomes(case, "1f1b")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "slices", "name", "shared"),
    [
        pytest.param(*chosen, 1, marks=() if chosen in USUAL else pytest.mark.full)
        for chosen in product((2, 4), ("2", "4", "8"), SCHEDULES)
    ]
    + [pytest.param(*chosen, 2, marks=pytest.mark.full) for chosen in USUAL[:2]],
)
def test_a_sliced_step_is_that_of_the_same_slices_on_one_rank_to_the_last_bit(
    ranks: RankPools, p: int, slices: str, name: str, shared: int
) -> None:
    """Or on the ranks that share them."""
    case = GPTCase(layers=2 * p, dtype="bfloat16", slices=slices, context_parallel=shared)
    for place, expected in enumerate(ranks(shared).run(on_one_rank, case=case)):
        found = ranks(shared * p).run(outcomes, case=case, name=name)[place::shared]
        assert [loss for one in found for loss in one.losses] == expected.losses
        gradients = {name: tensor for one in found for name, tensor in one.gradients.items()}
        assert gradients.keys() == expected.gradients.keys()
        for key, tensor in gradients.items():
            assert torch.equal(tensor, expected.gradients[key]), key


def test_a_table_counts_whole_microbatches() -> None:
    """Its numbers of microbatches are those of the job, not of slices."""
    table = schedules.build("v-half", pipeline_size=2, num_microbatches=3, slices=4)
    job = JobSizes(pipeline_size=2, num_microbatches=3, layers=Layers(4), sequence=64)
    slicing = PipelineAdapter.of_table(table, job).current.slicing
    assert slicing is not None and slicing.slices == 4
    with pytest.raises(UsageError, match="2 pipeline ranks and 3 microbatches, but the job has"):
        PipelineAdapter.of_table(table, replace(job, num_microbatches=12))


@pytest.mark.parametrize(("hidden", "slices"), [(8192, 4), (4096, None)])
def test_the_number_of_slices_follows_from_the_hidden_size(hidden: int, slices: int | None) -> None:
    job = JobSizes(
        pipeline_size=4, num_microbatches=2, layers=Layers(8), sequence=4096, hidden=hidden
    )
    settings = ScheduleSettings(pipeline_schedule="zb-h1", pipeline_slices="auto")
    slicing = PipelineAdapter.create(settings, job).current.slicing
    assert (slicing and slicing.slices) == slices
