"""A job that measures itself: what it finds, and that training does not change by it."""

from __future__ import annotations

import io
import weakref
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from adapters import scheduled
from brief_searches import briefly
from gpt_cases import (
    SEQUENCE,
    VOCABULARY,
    GPTCase,
    built,
    forward_backward,
    gradients,
    microbatches,
    skip_without_hybrids,
)
from megatron.core import parallel_state
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from model_options import EXPERTS, MAMBA
from rank_process import Kind
from ranks import RankPools
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.parts import AFTER, BEFORE, LAYERS, of_kind
from megatron_zb.measured.profile import (
    PartSeconds,
    Profile,
    ShardHost,
    StageProfile,
    read_profile,
    write_profile,
)
from megatron_zb.measured.trace import compare
from megatron_zb.megatron_core import profiling
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_core.profiled_steps import iterations_left, marking
from megatron_zb.megatron_core.profiling import (
    ITERATIONS,
    PAIRED,
    TIMED,
    WARM_UP,
    WHOLE,
    HeldStage,
    Profiling,
)
from megatron_zb.runtime import observer
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.runtime.observer import MemoryRecorder, Recorder, Span
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.lowering import peak_with_messages
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import v_shape

M = 6


@dataclass
class Seen:
    """What one rank saw in each iteration; ``data`` and ``tensor`` are its parallel ranks."""

    data: int
    tensor: int
    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    orders: list[schedules.Schedule] = field(default_factory=list)
    costs: list[schedules.Costs] = field(default_factory=list)


def train(
    case: GPTCase,
    schedule: str | None,
    iterations: int,
    path: Path | None = None,
    every: int | None = None,
    m: int = M,
) -> Seen:
    """Iterations of the same batches; ``schedule=None`` is Megatron's own 1F1B."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    search = briefly if case.vocabulary else nullcontext
    with search(), built(case, schedule, m) as (adapter, chunks):
        seen = Seen(
            parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
        )
        if adapter is not None:
            adapter.profile(path, every)
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        for _ in range(iterations):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [microbatches(case, m) for _ in chunks]
            records = forward_backward(function, chunks, data, m)
            seen.losses.append([float(record["lm loss"]) for record in records])
            seen.gradients.append({name: g.clone() for name, g in gradients(chunks)})
            if adapter is not None:
                seen.orders.append(adapter.schedule)
                seen.costs.append(adapter.costs)
    return seen


def check_same(found: list[Seen], upstream: list[Seen]) -> None:
    """Every iteration has the losses and the gradients of Megatron's own."""
    expected = {
        (rank.tensor, name): g for rank in upstream for name, g in rank.gradients[0].items()
    }
    losses = {rank.data: rank.losses[0] for rank in upstream if rank.losses[0]}
    for rank in found:
        for of_iteration in rank.losses:
            assert of_iteration in ([], losses[rank.data])
        for of_step in rank.gradients:
            for name, gradient in of_step.items():
                assert torch.equal(gradient, expected[rank.tensor, name]), name
    assert all(any(rank.losses[i] for rank in found) for i in range(len(found[0].losses)))


def fused(schedule: schedules.Schedule) -> int:
    return sum(p.kind is PassKind.BW for rank in schedule.ranks for p in rank)


@pytest.mark.slow
def test_the_profile_of_a_run(ranks: RankPools, tmp_path: Path) -> None:
    case, path = GPTCase(layers=8), tmp_path / "profile.yaml"
    pool = ranks(4)
    found = pool.run(train, case=case, schedule="v-half", iterations=ITERATIONS + 2, path=path)
    check_same(found, pool.run(train, case=case, schedule=None, iterations=1))
    orders = found[0].orders
    whole = [fused(order) == 8 * M for order in orders]
    split = [fused(order) == 0 for order in orders]
    assert (WARM_UP, TIMED, WHOLE) == (2, 4, 2)
    assert split == [True] * 6 + [False] * 2 + [False] * 3
    assert whole == [False] * 6 + [True] * 2 + [False] * 3
    assert orders[-1] == orders[-2]
    profile = read_profile(path)
    assert profile.schedule == "v-half"
    assert profile.num_microbatches == M
    assert "".join(stage.layers for stage in profile.stages) == "E" + "t" * case.layers + "L"
    assert profile.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
    assert len(profile.links) == 6
    for stage in profile.stages:
        assert 0 < stage.held_for_weight < stage.activation
    parts = profile.parts
    assert parts is not None
    assert min(parts.layer.forward, parts.layer.backward, parts.layer.weight) > 0
    attention = profile.attention
    assert attention is not None
    assert 0 < attention.forward < parts.layer.forward
    assert 0 < attention.backward < parts.layer.backward
    assert min(parts.output.forward, parts.output.backward, parts.output.weight) > 0
    assert parts.embedding.forward > 0
    assert parts.embedding.weight == 0
    assert parts.multi_token.total == 0
    assert min(parts.empty_pass.forward, parts.empty_pass.backward, parts.empty_pass.weight) > 0
    assert min(parts.layer.whole, parts.output.whole, profile.host.whole) > 0
    assert min(profile.host.forward, profile.host.backward, profile.host.weight) > 0
    assert profile.outside > 0
    middle = profile.stages[1:-1]
    assert len({(stage.activation, stage.held_for_weight) for stage in middle}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        GPTCase(layers=8, vocabulary=True),
        pytest.param(GPTCase(layers=8, vocabulary=True, tied=True), marks=pytest.mark.full),
        pytest.param(
            GPTCase(layers=8, vocabulary=True, multi_token=1, rotary=True), marks=pytest.mark.full
        ),
    ],
    ids=["plain", "tied", "prediction"],
)
def test_the_profile_of_a_run_with_a_sharded_vocabulary(
    ranks: RankPools, tmp_path: Path, case: GPTCase
) -> None:
    """Its losses and gradients are those of a run that does not measure."""
    path, depths = tmp_path / "profile.yaml", 1 + case.multi_token
    pool = ranks(4)
    found = pool.run(train, case=case, schedule="v-half", iterations=ITERATIONS + 1, path=path)
    usual = pool.run(train, case=case, schedule="v-half", iterations=1)
    for measured, other in zip(found, usual, strict=True):
        assert all(losses == other.losses[0] for losses in measured.losses)
        for of_step in measured.gradients:
            assert all(torch.equal(g, other.gradients[0][name]) for name, g in of_step.items())
    assert found[-1].losses[0]
    profile = read_profile(path)
    sharded = profile.vocabulary
    assert sharded is not None
    assert len(sharded.shards) == 4
    assert profile.model.vocabulary == VOCABULARY
    assert (
        min(sharded.loss, *(min(s.output, s.weight, s.lookup, s.gradient) for s in sharded.shards))
        > 0
    )
    assert min(getattr(sharded.host, name) for name in ShardHost.model_fields) > 0
    tokens, hidden = SEQUENCE * 2 * depths, 32
    received = tokens * (4 * hidden + 16)  # the last stage's output and its labels
    logits = tokens * 4 * VOCABULARY // 4
    assert [s.held for s in sharded.shards] == [received + logits] * 4
    # every rank sends to that of the first and the last stage, which is rank 0, and back
    assert len(profile.links) == 6 + 4
    costs = profile.costs(found[0].orders[-1].placement).for_placement(v_shape(4))
    expected = [stage.forward + profile.host.forward for stage in profile.stages]
    assert costs.seconds[PassKind.F] == pytest.approx(expected)
    assert set(costs.memory["logits"][8:]) == {sharded.shards[0].held}
    traced = compare(path)
    kinds = set(map(PassKind, "FBWOPVEG" + "MK" * case.multi_token))
    assert {p.kind for p in traced.measured.schedule.ranks[0]} == kinds
    assert Fit.of(profile).depths == depths
    kept, _ = (Fit.of(profile).in_layers(sharded=sharded)[1] for sharded in (True, False))
    assert (kept > 0.5) is (depths > 1)


HYBRID = GPTCase(hybrid="*-M-*-M-", layers=8, options=MAMBA)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
def test_the_profile_of_a_hybrid_model_has_its_letters(
    ranks: RankPools, tmp_path: Path, schedule: str
) -> None:
    skip_without_hybrids(HYBRID)
    path, pool = tmp_path / "profile.yaml", ranks(2)
    found = pool.run(train, case=HYBRID, schedule=schedule, iterations=ITERATIONS, path=path)
    check_same(found, pool.run(train, case=HYBRID, schedule=None, iterations=1))
    profile = read_profile(path)
    assert profile.model.pattern == HYBRID.hybrid
    parts = profile.parts
    assert parts is not None and set(parts.letters) == set("*-M")
    for seconds in parts.letters.values():
        assert min(getattr(seconds, kind) for kind in PartSeconds.model_fields) > 0
    for kind in PartSeconds.model_fields:
        of = {letter: getattr(seconds, kind) for letter, seconds in parts.letters.items()}
        mean = sum(of[letter] for letter in profile.model.kinds) / HYBRID.layers
        assert getattr(parts.layer, kind) == pytest.approx(mean)
    assert profile.attention is not None
    assert 0 < 4 * profile.attention.forward < parts.letters["*"].forward


class Ran(torch.autograd.Function):
    """A layer's work, which is written down when it runs forward and backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, log: list[str], letter: str) -> torch.Tensor:
        ctx.log, ctx.letter = log, letter
        log.append(f"F {letter}")
        return 2 * value

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.log.append(f"B {ctx.letter}")
        return 2 * gradients[0], None, None


class LetterLayer(torch.nn.Module):
    def __init__(self, log: list[str], letter: str) -> None:
        super().__init__()
        self.log, self.letter = log, letter
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.weight * Ran.apply(hidden_states, self.log, self.letter)


class LetterStack(torch.nn.Module):
    """As Megatron's HybridStack, which knows the letters of its layers."""

    def __init__(self, log: list[str], letters: str, recomputes: bool) -> None:
        super().__init__()
        self.layer_type_list = list(letters)
        self.layers = torch.nn.ModuleList(LetterLayer(log, letter) for letter in letters)
        self.recomputes = recomputes

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.recomputes:
                hidden_states = checkpoint(layer, hidden_states, use_reentrant=True)
            else:
                hidden_states = layer(hidden_states=hidden_states)
        return hidden_states


class LetterModel(torch.nn.Module):
    pre_process = post_process = True

    def __init__(self, decoder: LetterStack) -> None:
        super().__init__()
        self.decoder = decoder
        self.embedding = torch.nn.Parameter(torch.ones(2))

    def forward(self) -> torch.Tensor:
        return self.decoder(1 * self.embedding).sum()


@pytest.mark.parametrize("recomputes", [False, True])
def test_each_layer_of_a_hybrid_model_runs_behind_its_own_mark(recomputes: bool) -> None:
    log: list[str] = []
    decoder, queue = LetterStack(log, "*--M*", recomputes), WeightGradQueue()
    model = LetterModel(decoder)
    with marking(log.append, [model], [queue]):
        loss = model()
        assert log[0] == BEFORE and log[-1] == AFTER
        loss.backward()
        assert log[-1] == AFTER
        marked, ran = "", []
        for each in log:
            way, _, letter = each.partition(" ")
            if way in ("F", "B"):
                ran.append(each)
                assert marked == of_kind(LAYERS, letter), log
            else:
                marked = each
        backward = [of for letter in "*M--*" for of in (f"F {letter}", f"B {letter}")]
        forward = [f"F {letter}" for letter in "*--M*"]
        assert ran == forward + (backward if recomputes else backward[1::2])
        assert queue.on_task is not None
        for layer in decoder.layers:
            queue.on_task((cast("LetterLayer", layer).weight,))
        assert log[-5:] == [of_kind(LAYERS, letter) for letter in "*--M*"]


@pytest.mark.slow
def test_an_encoder_counts_as_a_part_of_the_embedding(ranks: RankPools, tmp_path: Path) -> None:
    case, path = GPTCase(images=(1, 2)), tmp_path / "profile.yaml"
    found = ranks(2).run(train, case=case, schedule="v-half", iterations=ITERATIONS, path=path)
    check_same(found, ranks(2).run(train, case=case, schedule=None, iterations=1))
    parts = read_profile(path).parts
    assert parts is not None
    assert parts.embedding.weight > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        GPTCase(),
        pytest.param(GPTCase(data_parallel=2, overlap_grad_reduce=True), marks=pytest.mark.full),
        pytest.param(GPTCase(tensor_parallel=2), marks=pytest.mark.full),
    ],
    ids=["pipeline", "data-parallel", "tensor-parallel"],
)
def test_auto_goes_on_with_a_schedule_for_what_it_has_measured(
    ranks: RankPools, case: GPTCase
) -> None:
    pool = ranks(2 * case.data_parallel * case.tensor_parallel)
    found = pool.run(train, case=case, schedule="auto", iterations=ITERATIONS + 2)
    check_same(found, pool.run(train, case=case, schedule=None, iterations=1))
    check_replanned(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        GPTCase(vocabulary=True),
        pytest.param(GPTCase(vocabulary=True, tensor_parallel=2), marks=pytest.mark.full),
        pytest.param(GPTCase(vocabulary=True, multi_token=1, rotary=True), marks=pytest.mark.full),
    ],
    ids=["plain", "tensor-parallel", "prediction"],
)
def test_auto_goes_on_with_a_sharded_vocabulary_too(ranks: RankPools, case: GPTCase) -> None:
    pool = ranks(2 * case.tensor_parallel)
    found = pool.run(train, case=case, schedule="auto", iterations=ITERATIONS + 2)
    check_replanned(found)
    for rank in found:
        assert all(losses == rank.losses[0] for losses in rank.losses)
        for of_step in rank.gradients:
            assert all(torch.equal(g, of_step[name]) for name, g in rank.gradients[0].items())
    counted_costs, measured_costs = (found[0].costs[i].feature(Vocabulary) for i in (0, -1))
    assert counted_costs is not None and measured_costs is not None
    assert counted_costs.loss == 0 < measured_costs.loss
    kinds = {p.kind for rank in found[0].orders[-1].ranks for p in rank}
    assert kinds >= set(map(PassKind, "OPVEG"))


def check_replanned(found: list[Seen]) -> None:
    """All ranks have gone on with one order, which is no slower for what was measured."""
    first, *others = found
    assert all(rank.orders == first.orders and rank.costs == first.costs for rank in others)
    assert first.costs[0] != first.costs[-1] == first.costs[-2]
    at_first = schedules.simulate(first.orders[0], first.costs[-1]).makespan
    at_last = schedules.simulate(first.orders[-1], first.costs[-1]).makespan
    assert at_last <= at_first * (1 + 1e-9)


@pytest.mark.slow
def test_a_named_schedule_is_built_anew_every_so_often(ranks: RankPools) -> None:
    case, every = GPTCase(), ITERATIONS + 1
    pool = ranks(2)
    iterations = ITERATIONS + every
    found = pool.run(train, case=case, schedule="zb-h1", iterations=iterations, every=every)
    check_same(found, pool.run(train, case=case, schedule=None, iterations=1))
    costs = found[0].costs
    seconds = {id(c) if c is None else c.seconds[PassKind.F] for c in costs}
    assert len(seconds) == 3  # equal, and two profiles
    assert all(rank.costs == costs and rank.orders == found[0].orders for rank in found)


def counted(case: GPTCase, schedule: str, path: Path) -> tuple[int, int]:
    """The peak of activations on this rank: predicted from a profile, and counted."""
    with built(case, schedule, M) as (adapter, chunks):
        assert adapter is not None
        adapter.profile(path, None)
        function = adapter.forward_backward_func

        def step() -> None:
            data = [microbatches(case, M) for _ in chunks]
            forward_backward(function, chunks, data, M)

        for _ in range(ITERATIONS):
            step()
        memory = ActivationMemory(p for chunk in chunks for p in chunk.parameters())
        adapter.track(memory)
        with memory.watching():
            step()
        rank = adapter.physical.logical(parallel_state.get_pipeline_model_parallel_rank())
        torch.distributed.barrier()
        profile = read_profile(path)
        placement = adapter.schedule.placement
        program = schedules.lower(adapter.schedule)
        costs = profile.costs(placement).for_placement(placement)
        predicted = peak_with_messages(program, rank, costs, profile.message)
        return round(predicted), memory.peak_bytes


SPLIT = [
    *("zb-h1", "v-half", "dualpipe-v", "wave"),
    *(
        pytest.param(s, marks=pytest.mark.full)
        for s in ("zb-h2", "zb-1p", "zb-2p", "v-zb", "v-min")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SPLIT)
def test_predicted_activations_are_those_that_are_counted(
    ranks: RankPools, tmp_path: Path, schedule: str
) -> None:
    path, case = tmp_path / "profile.yaml", GPTCase(layers=8 if schedule == "wave" else 4)
    for predicted, peak in ranks(2).run(counted, case=case, schedule=schedule, path=path):
        assert predicted == pytest.approx(peak, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["v-half", pytest.param("zb-h1", marks=pytest.mark.full)])
def test_predicted_activations_count_shards_of_a_sharded_vocabulary(
    ranks: RankPools, tmp_path: Path, schedule: str
) -> None:
    path, case = tmp_path / "profile.yaml", GPTCase(layers=8, vocabulary=True)
    for predicted, peak in ranks(2).run(counted, case=case, schedule=schedule, path=path):
        assert predicted == pytest.approx(peak, rel=0.03)


EXCHANGING = GPTCase(
    dtype="bfloat16",
    data_parallel=2,
    expert_parallel=2,
    all_to_all_overlaps=True,
    options=tuple(EXPERTS.items()),
)
# Of a chunk, in F and in B or BW; what a pair hides of either; and of a W.
SECONDS, HIDDEN, WEIGHT = (0.03, 0.04), (0.008, 0.011), 0.02


def train_by_made_up_seconds(schedule: str, **more: Any) -> Seen:
    """Train with passes that take these seconds by the clock that measures them."""
    run, run_weights = TransformerModelChunkSchedulePlan.run, WeightGradQueue.run
    now = 0.0

    def timed(forward: Any, backward: Any, **of_plans: Any) -> Any:
        nonlocal now
        plans = list(zip((forward, backward), SECONDS, strict=True))
        now += sum(seconds for plan, seconds in plans if plan is not None)
        if forward is not None and backward is not None:
            now -= sum(HIDDEN[plan.vp_stage] for plan, _ in plans)
        return run(forward, backward, **of_plans)

    def timed_weights(self: WeightGradQueue, microbatch: int) -> None:
        nonlocal now
        now += WEIGHT
        run_weights(self, microbatch)

    with (
        briefly(),
        patch.object(TransformerModelChunkSchedulePlan, "run", staticmethod(timed)),
        patch.object(WeightGradQueue, "run", timed_weights),
        patch.object(observer, "time", SimpleNamespace(perf_counter=lambda: now)),
    ):
        return train(EXCHANGING, schedule, m=4, **more)


@pytest.mark.full
def test_the_profile_of_a_run_with_pairs(ranks: RankPools, tmp_path: Path) -> None:
    """Its schedule is built anew for the seconds that pairs hide; training does not change."""
    path, pool, profiling = tmp_path / "profile.yaml", ranks(4), ITERATIONS + PAIRED
    found = pool.run(
        train_by_made_up_seconds,
        schedule="v-half",
        iterations=profiling + 1,
        path=path,
        every=profiling + 1,
    )
    usual = pool.run(train, case=EXCHANGING, schedule="v-half", iterations=1, m=4)
    for rank, other in zip(found, usual, strict=True):
        assert all(losses == other.losses[0] for losses in rank.losses)
        for of_step in rank.gradients:
            assert all(torch.equal(g, other.gradients[0][n]) for n, g in of_step.items())
    check_replanned(found)
    orders = found[0].orders
    assert [bool(order.pairs) for order in orders] == [False] * 8 + [True] * 5

    profile = read_profile(path)
    joined = {
        (f.stage, b.stage, b.kind is PassKind.BW)
        for rank in orders[8].ranks
        for f, b in pairwise(rank)
        if f in orders[8].pairs
    }
    assert {(pair.forward, pair.backward, pair.whole) for pair in profile.pairs} == joined
    placement, (forward, backward) = orders[8].placement, SECONDS
    assert placement.rank_of == (0, 1, 1, 0)
    hidden = [HIDDEN[chunk] for chunk in (0, 0, 1, 1)]
    for pair in profile.pairs:
        saved = hidden[pair.forward] + hidden[pair.backward]
        assert pair.seconds == pytest.approx(forward + backward - saved)
    costs = profile.costs(placement, host=False).for_placement(placement)
    assert costs.seconds[PassKind.F] == pytest.approx([forward] * 4)
    assert costs.seconds[PassKind.B] == pytest.approx([backward] * 4)
    assert costs.seconds[PassKind.BW] == pytest.approx([backward] * 4)
    for pair in profile.pairs:
        kind = PassKind.BW if pair.whole else PassKind.B
        both = Pair(Pass(PassKind.F, pair.forward, 1), Pass(kind, pair.backward, 0))
        assert costs.pair_seconds(both) == pytest.approx(pair.seconds)


@pytest.mark.usefixtures("brief_searches")
def test_a_profile_of_pairs_takes_longer() -> None:
    adapter = scheduled(
        "v-half", pipeline_size=4, num_microbatches=8, layers=Layers(8), overlaps_all_to_all=True
    )
    with pytest.raises(UsageError, match=r"--pipeline-replan-every is 12: .*give 13 or more"):
        adapter.profile(None, ITERATIONS + PAIRED)


def adapter_of(schedule: str) -> PipelineAdapter:
    return scheduled(schedule, pipeline_size=4, num_microbatches=8, layers=Layers(8))


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UsageError, match="--pipeline-profile needs a schedule that splits"):
        adapter_of("1f1b").profile(Path("profile.yaml"), None)
    with pytest.raises(UsageError, match=r"--pipeline-replan-every is 9: .*give 10 or more"):
        adapter_of("v-half").profile(None, ITERATIONS)
    with pytest.raises(UsageError, match="--pipeline-schedule-file: a finished schedule"):
        adapter_of("v-half").profile(None, 100, is_named=False)


SHORT = "--pipeline-profile profile.yaml has measured nothing: it needs 9 iterations of 6 "


def said_in_a_run(
    iterations: int, left: int | None, pipeline: tuple[Path | None, int | None], m: int = M
) -> list[str]:
    """What a run of some iterations prints, to its end; it knows how many are left, or does not."""
    printed = io.StringIO()
    with redirect_stdout(printed), built(GPTCase(), "zb-h1", M) as (adapter, chunks):
        assert adapter is not None
        adapter.profile(*pipeline)
        adapter.count_iterations(lambda: left)
        function = adapter.forward_backward_func
        for _ in range(iterations):
            forward_backward(function, chunks, [microbatches(GPTCase(), m) for _ in chunks], m)
        function.close()
    return [line for line in printed.getvalue().splitlines() if line.startswith("megatron_zb: ")]


@pytest.mark.parametrize(
    ("iterations", "left", "m", "said"),
    [
        (
            1,
            7,
            M,
            "--pipeline-profile profile.yaml needs 9 iterations, and this run has 7: nothing is "
            "measured; train for 2 more, or leave it out",
        ),
        (2, None, M, f"{SHORT}microbatches, 7 more than this run had"),
        (2, 20, 4, f"{SHORT}microbatches, 9 more than this run had"),
        (0, None, M, f"{SHORT}microbatches, 9 more than this run had"),
    ],
    ids=["known", "unknown", "other microbatches", "no training"],
)
def test_a_run_that_is_too_short_for_its_profile_says_what_is_missing(
    ranks: RankPools, iterations: int, left: int | None, m: int, said: str
) -> None:
    """Once, on the first rank."""
    run: dict[str, Any] = {"iterations": iterations, "left": left, "m": m}
    found = ranks(2).run(said_in_a_run, pipeline=(Path("profile.yaml"), None), **run)
    assert found == [[f"megatron_zb: {said}"], []]


def test_a_run_of_a_whole_profile_misses_nothing(ranks: RankPools, tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    run: dict[str, Any] = {"iterations": ITERATIONS, "left": ITERATIONS}
    found = ranks(2).run(said_in_a_run, pipeline=(path, None), **run)
    assert found == [[f"megatron_zb: the profile is in {path}"], []]


def test_a_run_ends_at_its_last_iteration_or_at_an_interval() -> None:
    assert iterations_left(3, 10, None) == 7
    assert iterations_left(3, 10, 5) == 2
    assert iterations_left(5, 10, 5) == 5
    assert iterations_left(8, 10, 50) == 2
    assert iterations_left(8, None, None) is None


def profile(**changes: Any) -> dict[str, Any]:
    stage = {
        "rank": 0,
        "layers": "Et",
        "forward": 0.1,
        "backward": 0.2,
        "weight": 0.1,
        "activation": 100,
        "held_for_weight": 50,
    }
    return {
        "version": 1,
        "device": "CPU",
        "schedule": "zb-h1",
        "pipeline_size": 2,
        "num_microbatches": 4,
        "message": 8,
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "sequence_length": 16,
            "microbatch": 1,
            "tensor": 1,
            "context": 1,
        },
        "stages": [stage, {**stage, "rank": 1, "layers": "tL"}],
        "links": [{"source": 0, "target": 1, "seconds": 0.01}],
        **changes,
    }


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    written = Profile.model_validate(profile())
    write_profile(written, tmp_path / "new" / "profile.yaml")
    assert read_profile(tmp_path / "new" / "profile.yaml") == written
    costs = written.costs(schedules.build("zb-h1", pipeline_size=2, num_microbatches=4).placement)
    assert costs.seconds[PassKind.F] == (0.1, 0.1)
    assert costs.p2p == ((0.0, 0.01), (0.01, 0.0))
    with pytest.raises(UsageError, match="profile a run of this placement"):
        written.costs(schedules.build("v-half", pipeline_size=2, num_microbatches=4).placement)


class StandInAllocator(TorchDispatchMode):
    """In place of a GPU's allocator: the bytes of all storages that operations have made."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self._seen = 0, set[int]()

    def memory_allocated(self) -> int:
        return self.live

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())

    def _free(self, key: int, nbytes: int) -> None:
        self._seen.discard(key)
        self.live -= nbytes


def profiled_by_allocator(case: GPTCase, path: Path) -> None:
    """As on a GPU, but for the clock."""
    step, recorder, allocator = Profiling.step, profiling.Recorder, StandInAllocator()
    upstream = torch.cuda.memory_allocated

    def as_on_gpu(self: Profiling, memory: Any, parameters: Any, on_gpu: bool, mark: Any) -> Any:
        return step(self, memory, parameters, True, mark)

    change: Any = Profiling
    change.step = as_on_gpu
    patched: Any = profiling
    patched.Recorder = lambda on_gpu: recorder(False)
    torch.cuda.memory_allocated = lambda *_: allocator.memory_allocated()
    try:
        with allocator:
            train(case, "v-half", ITERATIONS, path=path)
    finally:
        change.step, patched.Recorder, torch.cuda.memory_allocated = step, recorder, upstream


@pytest.mark.slow
def test_on_a_gpu_the_allocator_says_what_passes_hold(ranks: RankPools, tmp_path: Path) -> None:
    """What autograd says that it saves, and what W is said to need.

    But for the input of a chunk's latest F, which Megatron's chunk keeps until its next one, and
    for the loss mask, which the last stage, on the same rank, finds when the first one has read it.
    """
    case, pool = GPTCase(), ranks(2, Kind.PLAIN)  # whose memory is that of the passes alone
    pool.run(train, case=case, schedule="v-half", iterations=ITERATIONS, path=tmp_path / "hooks")
    pool.run(profiled_by_allocator, case=case, path=tmp_path / "allocator")
    hooks, allocator = (read_profile(tmp_path / name) for name in ("hooks", "allocator"))
    little, mask = 64, 2 * SEQUENCE * 4  # bytes; little is such as a loss
    stages = zip(allocator.stages, hooks.stages, (mask, 0, 0, -mask), strict=True)
    for one, other, read in stages:
        assert -hooks.message - little <= one.activation - other.activation - read <= little
        assert abs(one.held_for_weight - other.held_for_weight - read) <= little


class Clock:
    """Recorders whose times are of no interest here."""

    def __init__(self, passes: list[Pass]) -> None:
        self._passes = passes

    def spans(self) -> list[Span]:
        return [Span(p, 0.0, 1.0) for p in self._passes]


@pytest.mark.parametrize(
    ("after_f", "of_b", "activation", "held_for_weight"),
    [(100, -40, 100, 60), (100, 30, 130, 130), (100, -120, 100, 0), (-10, 0, 0, 0)],
    ids=["less", "more", "nothing", "negative"],
)
def test_what_w_holds_beyond_the_activations_is_counted_from_f_on(
    after_f: int, of_b: int, activation: int, held_for_weight: int
) -> None:
    """A schedule takes B to free memory alone; a limit must hold all the same."""
    held = [HeldStage(0, 0, "tL")]
    one = Profiling(
        scheduled("zb-h1", pipeline_size=2, num_microbatches=M, layers=Layers(4)).current, held
    )
    memory = MemoryRecorder(ActivationMemory())
    for microbatch in range(3):
        memory.changes[Pass(PassKind.F, 0, microbatch)] = after_f
        memory.changes[Pass(PassKind.B, 0, microbatch)] = of_b
    one._memory = memory
    passes = [Pass(kind, 0, 0) for kind in (PassKind.F, PassKind.B, PassKind.W, PassKind.BW)]
    one._recorders = [cast("Recorder", Clock(passes))]
    steps = [recorder.spans() for recorder in one._recorders]
    found = one._stage(held[0], profiling._mean_within(steps), 7)
    assert (found.activation, found.held_for_weight) == (activation, held_for_weight)


def parts(**changes: float) -> dict[str, Any]:
    seconds = {"forward": 0.1, "backward": 0.1, "weight": 0.1, "whole": 0.2}
    names = ("embedding", "output", "multi_token", "empty_pass")
    return {"layer": {**seconds, **changes}, **{name: dict(seconds) for name in names}}


def stage(**changes: Any) -> list[dict[str, Any]]:
    first, second = profile()["stages"]
    return [{**first, **changes}, second]


def of_letters(pattern: str | None, letters: str, **first: Any) -> dict[str, Any]:
    """The profile of a hybrid model; ``first`` changes the seconds of its first letter."""
    seconds = {"forward": 0.1, "backward": 0.1, "weight": 0.1, "whole": 0.2}
    of = {letter: dict(seconds) for letter in letters}
    of[letters[0]] |= first
    model = {**profile()["model"], "pattern": pattern}
    return profile(model=model, parts={**parts(), "letters": of})


def pair_of(forward: int, backward: int, seconds: float = 0.2) -> dict[str, Any]:
    return {"forward": forward, "backward": backward, "whole": False, "seconds": seconds}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (profile(version=6), "'version' is 6"),
        (profile(stages=stage(forward=0.0)), "'stages.0.forward' is 0.0: .*forward: 0.0125"),
        (profile(stages=stage(backward=-1.0)), "'stages.0.backward' is -1.0"),
        (profile(stages=stage(forwards=1.0)), "did you mean forward, such as forward: 0.0125"),
        (profile(stages=stage(layers="tE")), "'stages.0.layers' is 'tE'.*layers: Ett"),
        (profile(stages=stage(held_for_weight=101)), "more than activation 100"),
        (profile(stages=stage(rank=1)), "stages: their ranks must be 0 to 1"),
        (profile(stages=stage(layers="Ett")), "they have 3 layers and the model has 2"),
        (profile(links=[{"source": 0, "target": 2, "seconds": 1.0}]), "from rank 0 to 2"),
        (profile(links=[{"source": 0, "target": 1}]), "'links.0.seconds' is missing"),
        (profile(parts=parts(forward=-1.0)), "'parts.layer.forward' is -1.0"),
        (profile(parts=parts(forward=0.0)), "parts.layer: its forward and backward must be"),
        (profile(host={"forward": 0.1, "backward": 0.1}), "'host.weight' is missing"),
        (profile(pairs=[pair_of(0, 1)]), "pairs.0: stages 0 and 1 are not on one rank"),
        (profile(pairs=[pair_of(0, 2)]), "pairs.0: stages 0 and 2 are not on one rank"),
        (profile(stages=stage(whole=0.3)), "stages: some tell their whole backward and some do"),
        ({k: v for k, v in profile().items() if k != "model"}, "'model' is missing.*layers: 32"),
        (of_letters("*-", "*-", forward=-1.0), r"'parts.letters.\*.forward' is -1.0: .*: 0.0125"),
        (of_letters("*-", "*-", forward=0.0), r"parts.letters.\*: its forward and backward must"),
        (of_letters("*-", "*-", weights=0.1), "did you mean weight, such as weight: 0.0125"),
        (of_letters("*-", "*-", backward=[]), r"'parts.letters.\*.backward' is a list"),
        (
            of_letters("*-", "*"),
            r"parts.letters: they are \*, and the layers of .* are \*, -; give",
        ),
        (
            of_letters("*-", "*-M"),
            r"they are \*, -, M, .*; give seconds for each letter of the pattern",
        ),
        (of_letters(None, "*-"), "they are .*, and the layers of model.pattern are none; give"),
        (of_letters("*-*", "*-"), "model.pattern has 3 letters before '/' and the model has 2"),
        (of_letters("*|-", "*-"), r"'model.pattern' is '\*\|-': .*pattern: 'M\*-E'"),
        (profile(parts={**parts(), "letters": {"M": 1}}), "'parts.letters.M' is 1: .*M: {forward"),
    ],
)
def test_a_broken_profile_is_refused(tmp_path: Path, broken: dict[str, Any], said: str) -> None:
    import yaml

    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(broken), encoding="utf-8")
    with pytest.raises(UsageError, match=said):
        read_profile(path)


@pytest.mark.parametrize("name", ["forward", "backward", "weight", "whole", "recompute"])
def test_a_pass_of_a_profile_takes_less_than_a_day(name: str) -> None:
    from megatron_zb.measured.profile import StageProfile as Stage

    values = profile()["stages"][0]
    assert getattr(Stage(**{**values, name: 99_999.0}), name) == 99_999.0
    with pytest.raises(ValueError, match="less than 100000"):
        Stage(**{**values, name: 100_000.0})


def test_replicas_count_as_their_slowest() -> None:
    from megatron_zb.measured.profile import merged

    values = profile()["stages"][0]
    fast, slow = (StageProfile(**{**values, "forward": t}) for t in (0.1, 0.3))
    assert merged([[fast, slow], [fast]]) == [slow, fast]
