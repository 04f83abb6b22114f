"""Streams of layers: with them, weights and dropout masks are the same under every schedule."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import gpt_cases
import pytest
import torch
from adapters import scheduled
from gpt_cases import GPTCase, built, forward_backward, microbatches
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from model_options import RECOMPUTED, SELECTIVE
from ranks import RankPools
from recompute_offload import with_recompute_offload

from megatron_zb.job.settings import asks_for_layer_streams
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.random_streams import LayerStreams, RandomState, global_parameters
from megatron_zb.schedules import Schedule, build, layout
from megatron_zb.schedules.layout import Layers

DROPOUT = GPTCase(layers=8, dropout=0.1, drawn=True)
EXPERTS = replace(
    DROPOUT,
    data_parallel=2,
    expert_parallel=2,
    options=(
        ("num_moe_experts", 4),
        ("moe_router_topk", 2),
        ("moe_token_dispatcher_type", "alltoall"),
        ("add_bias_linear", False),
    ),
)
TIED = pytest.mark.parametrize(
    "tied", [pytest.param(False, marks=pytest.mark.full), True], ids=["untied", "tied"]
)


@dataclass
class Run:
    """What the ranks of a job have drawn and computed, gathered; weights by global name."""

    losses: list[list[float]] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)

    def add(self, other: Run) -> None:
        self.losses = max(self.losses, other.losses)
        for mine, theirs in ((self.weights, other.weights), (self.gradients, other.gradients)):
            for name in mine.keys() & theirs.keys():  # a tied weight, or a replica's
                assert mine[name] == theirs[name], name
            mine.update(theirs)


def train(
    case: GPTCase,
    schedule: str | Schedule | None,
    steps: tuple[int, ...] = (0, 1),
    count: int = 4,
    by_layer: bool = True,
    evaluates: bool = False,
    lost: str = "",
) -> Run:
    """Steps without an optimizer: losses follow from weights, data and masks.

    Args:
        lost: a tracked state that a checkpoint of another placement does not have for this rank.
    """
    now = [0]
    steps_done = (lambda: now[0]) if by_layer else None
    with built(case, schedule, count, steps_done) as (adapter, chunks):
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        found = Run(weights=_digests(chunks, lambda weight: weight))
        tracker = get_cuda_rng_tracker()
        tracker.set_states({n: s for n, s in tracker.get_states().items() if n != lost})
        for now[0] in steps:
            gpt_cases._zero_gradients(chunks)
            if evaluates:
                _step(function, case, chunks, count, forward_only=True)
            records = _step(function, case, chunks, count)
            found.losses.append([float(record["lm loss"]) for record in records])
        found.gradients = _digests(chunks, lambda weight: weight.main_grad)
    return found


def _step(function: Any, case: GPTCase, chunks: list[Any], count: int, **more: Any) -> list[Any]:
    data = [microbatches(case, count) for _ in chunks]
    return forward_backward(function, chunks, data, count, **more)


def _digests(chunks: list[Any], value: Any) -> dict[str, str]:
    """By global name, and by tensor-parallel and expert-parallel rank where those differ."""
    found = {}
    for chunk in chunks:
        for name, weight in global_parameters(chunk).items():
            key = f"{name.replace('module.', '')} of {_shard(name, weight)}"
            bits = value(weight).detach().float().contiguous().numpy().tobytes()
            found[key] = hashlib.sha256(bits).hexdigest()
    return found


def _shard(name: str, weight: Any) -> str:
    if "experts" in name:
        return f"EP {parallel_state.get_expert_model_parallel_rank()}"
    tensor = parallel_state.get_tensor_model_parallel_rank()
    return f"TP {tensor}" if getattr(weight, "tensor_model_parallel", False) else "all"


def gathered(ranks: RankPools, size: int, case: GPTCase, schedule: str | None, **more: Any) -> Run:
    whole = Run()
    more_ranks = case.tensor_parallel * case.data_parallel
    for found in ranks(size * more_ranks).run(train, case=case, schedule=schedule, **more):
        whole.add(found)
    assert whole.losses and whole.weights and whole.gradients
    return whole


def check_equal(ours: Run, reference: Run) -> None:
    assert ours.losses == reference.losses
    assert ours.gradients.keys() >= reference.gradients.keys()
    for name in reference.weights:
        assert ours.weights[name] == reference.weights[name], name
        assert ours.gradients[name] == reference.gradients[name], name


@pytest.mark.slow
@TIED
def test_all_schedules_and_sizes_draw_the_same(ranks: RankPools, tied: bool) -> None:
    case = replace(DROPOUT, tied=tied)
    reference = gathered(ranks, 2, case, "1f1b")
    first, second = reference.losses
    assert first != second, "every step draws masks of its own"
    for size, name in [(2, "v-half"), (2, "zb-h1"), (4, "1f1b"), (4, "v-half"), (4, "v-zb")]:
        check_equal(gathered(ranks, size, case, name), reference)


def test_a_resumed_run_draws_what_it_would_have_drawn(ranks: RankPools) -> None:
    whole = gathered(ranks, 2, DROPOUT, "v-half", steps=(0, 1, 2))
    resumed = gathered(ranks, 2, DROPOUT, "v-half", steps=(2,))
    assert resumed.losses == whole.losses[2:]
    assert resumed.gradients == whole.gradients


def test_an_evaluation_changes_nothing(ranks: RankPools) -> None:
    plain = gathered(ranks, 2, DROPOUT, "v-half")
    check_equal(gathered(ranks, 2, DROPOUT, "v-half", evaluates=True), plain)


@pytest.mark.parametrize(
    "options",
    [
        RECOMPUTED,
        SELECTIVE,
    ],
    ids=["full", "selective"],
)
def test_what_is_recomputed_is_drawn_once_more(ranks: RankPools, options: Any) -> None:
    """The backwards come after forwards of other microbatches, and in another order in a V."""
    reference = gathered(ranks, 2, DROPOUT, "zb-h1")
    for name in ("zb-h1", "v-half"):
        check_equal(gathered(ranks, 2, replace(DROPOUT, options=options), name), reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sequence", [pytest.param(False, marks=pytest.mark.full), True], ids=["tensor", "sequence"]
)
def test_tensor_parallel_ranks_draw_the_same_under_every_schedule(
    ranks: RankPools, sequence: bool
) -> None:
    case = replace(
        DROPOUT,
        tensor_parallel=2,
        sequence_parallel=sequence,
        rotary=sequence,
        drawn=not sequence,  # else the first draws of a rank are those of a forward
    )
    reference = gathered(ranks, 2, case, "1f1b")
    check_equal(gathered(ranks, 2, case, "v-half"), reference)
    name = "decoder.layers.3.mlp.linear_fc1.weight of TP"
    assert reference.weights[f"{name} 0"] != reference.weights[f"{name} 1"]


@pytest.mark.full
def test_experts_draw_the_same_under_every_schedule(ranks: RankPools) -> None:
    reference = gathered(ranks, 2, EXPERTS, "1f1b")
    check_equal(gathered(ranks, 2, EXPERTS, "v-half"), reference)
    name = "decoder.layers.3.mlp.experts.local_experts.0.linear_fc1.weight of EP"
    assert reference.weights[f"{name} 0"] != reference.weights[f"{name} 1"]


@pytest.mark.slow
@TIED
def test_multi_token_prediction_draws_the_same(ranks: RankPools, tied: bool) -> None:
    case = replace(DROPOUT, multi_token=2, rotary=True, tied=tied)
    reference = gathered(ranks, 2, case, "1f1b")
    check_equal(gathered(ranks, 2, case, "v-half"), reference)
    recomputed = replace(case, options=RECOMPUTED)
    check_equal(gathered(ranks, 2, recomputed, "zb-h1"), reference)


@pytest.mark.skipif(versions.core_series() < (0, 19), reason="its models are tested in 0.19")
def test_a_hybrid_model_draws_the_same(ranks: RankPools) -> None:
    case = replace(DROPOUT, hybrid="*-*-*-*-", multi_token=1, rotary=True)
    reference = gathered(ranks, 2, case, "1f1b")
    for size, name in ((2, "v-half"), (4, "zb-h1")):
        check_equal(gathered(ranks, size, case, name), reference)


MIXED = replace(DROPOUT, multi_token=2, rotary=True, options=(("mtp_hsm", True),))
MIXES = pytest.mark.skipif(
    versions.core_series() <= (0, 19), reason="Megatron mixes hidden states after 0.19"
)


@MIXES
@pytest.mark.parametrize(
    "case",
    [MIXED, replace(MIXED, dropout=0.0), replace(MIXED, hybrid="*-*-*-*-")],
    ids=["dropout", "no dropout", "hybrid"],
)
def test_mixed_hidden_states_are_drawn_the_same(ranks: RankPools, case: GPTCase) -> None:
    reference = gathered(ranks, 2, case, "1f1b")
    earlier = gathered(ranks, 2, case, "1f1b", steps=(0,))
    assert earlier.gradients != reference.gradients, "every step mixes others"
    for name in ("v-half", "zb-h1"):
        check_equal(gathered(ranks, 2, case, name, evaluates=True), reference)


@MIXES
def test_hidden_states_are_mixed_after_a_checkpoint_of_another_placement(ranks: RankPools) -> None:
    reference = gathered(ranks, 2, MIXED, "v-half")
    check_equal(gathered(ranks, 2, MIXED, "v-half", lost="mtp-hsm-rng"), reference)


@MIXES
def test_replicas_mix_other_hidden_states(ranks: RankPools) -> None:
    case = replace(MIXED, data_parallel=2)
    check_equal(gathered(ranks, 2, case, "v-half"), gathered(ranks, 2, case, "1f1b"))


# --- one stream of each rank


@MIXES
@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_hidden_states_of_ranks_are_mixed_as_upstreams(ranks: RankPools, name: str) -> None:
    upstream = gathered(ranks, 2, MIXED, None)
    check_equal(gathered(ranks, 2, MIXED, name, by_layer=False), upstream)


@pytest.mark.parametrize("name", ["zb-h1", "1f1b"])
def test_streams_of_ranks_are_upstreams(ranks: RankPools, name: str) -> None:
    """Weights as drawn, losses and gradients with dropout."""
    upstream = gathered(ranks, 2, DROPOUT, None)
    check_equal(gathered(ranks, 2, DROPOUT, name, by_layer=False), upstream)


def test_streams_of_ranks_differ_where_layers_move(ranks: RankPools) -> None:
    """Why layers have streams of their own."""
    upstream = gathered(ranks, 2, DROPOUT, None)
    moved = gathered(ranks, 2, DROPOUT, "v-half", by_layer=False)
    name = "decoder.layers.3.mlp.linear_fc1.weight of TP 0"
    assert moved.weights[name] != upstream.weights[name]
    assert moved.losses != upstream.losses


@pytest.mark.parametrize(
    ("name", "layers", "layout", "expected"),
    [
        ("zb-h1", Layers(8), None, True),
        ("1f1b", Layers(9), None, False),
        ("1f1b", Layers(9), "Etttt|tttttL", True),
        ("zb-h1", Layers(7, embedding=1), None, True),
        ("zb-h1", Layers(6, embedding=1, output=1), None, True),
        ("zb-h1", Layers(7, first=3), None, True),
        ("zb-h1", Layers(8), "Ettttt|tttL", True),
        ("interleaved", Layers(8), None, False),
        ("v-half", Layers(8), None, False),
    ],
)
def test_where_layers_are_as_in_upstream(
    name: str, layers: Layers, layout: str | None, expected: bool
) -> None:
    adapter = scheduled(
        name, pipeline_size=2, num_microbatches=4, layers=layers, layer_layout=layout
    )
    assert adapter.placed.keeps_places is expected
    assert asks_for_layer_streams(None, expected) is not expected
    assert asks_for_layer_streams("auto", expected) is not expected
    assert asks_for_layer_streams("layer", expected)
    assert not asks_for_layer_streams("rank", expected)


def test_a_balanced_layout_that_is_not_even_moves_layers() -> None:
    layers = Layers(8)
    placement = build("1f1b", pipeline_size=2, num_microbatches=4).placement
    even = layout.lettered(layout.spread(layers, placement))
    assert layout.is_megatrons(even, layers, placement)
    uneven = layout.read("Ettttt|tttL", layers, 2)
    assert not layout.is_megatrons(uneven, layers, placement)


# --- the streams themselves


@pytest.mark.parametrize(
    "setting",
    [
        "hidden_dropout",
        "attention_dropout",
        "moe_input_jitter_eps",
        "moe_router_force_load_balancing",
        "moe_router_force_biased",
        "mtp_hsm",
        None,
    ],
)
def test_layers_have_streams_where_anything_is_drawn(
    monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    learnt: list[bool] = []
    monkeypatch.setattr(LayerStreams, "_learn_origins", lambda streams: learnt.append(True))
    chunk: Any = torch.nn.Module()
    chunk.config = SimpleNamespace(**({setting: 0.1} if setting else {"hidden_dropout": 0.0}))
    chunk.embedding = torch.nn.Identity()
    LayerStreams(1).seed_forwards(chunk)
    assert learnt == ([True] if setting else [])


def draws() -> dict[str, list[float]]:
    """Numbers from each of Megatron's random states, inside and outside of layers."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    streams, tracker = LayerStreams(1), get_cuda_rng_tracker()
    before = RandomState()

    def drawn() -> list[float]:
        found = [torch.rand(1).item()]
        for name in sorted(tracker.get_states()):
            with tracker.fork(name):
                found.append(torch.rand(1).item())
        return found

    found: dict[str, list[float]] = {}
    for layer, step, microbatch in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)]:
        place = f"{layer}:{step}:{microbatch}"
        with streams.of_layer(place):
            numbers = drawn()
        assert found.setdefault(place, numbers) == numbers
    with tracker.fork(), streams.of_layer("0:0:0"):  # as in sequence parallelism
        found["sequence"] = [torch.rand(1).item()]
    with streams.of_layer("0:0:0"), streams.of_layer("inner"):
        assert drawn() == found["0:0:0"]
    after = drawn()
    before.restore()
    assert drawn() == after, "what is drawn outside of layers does not move"
    return found


@contextmanager
def tracked_generators() -> Iterator[None]:
    """Let Megatron's tracker hold generators, as for CUDA graphs, and draw from them.

    They are the CPU's. In place of Megatron's functions for a GPU's generators, which are handles
    as well: the one in use is a copy of the tracked one, and moves it on at the end.
    """
    from megatron.core.tensor_parallel import random

    kind: Any = random.CudaRNGStatesTracker
    names = ("add", "fork")
    usual = [getattr(kind, name) for name in names]

    def add(tracker: Any, name: str, seed: int) -> None:
        tracker.states_[name] = torch.Generator().manual_seed(seed)

    @contextmanager
    def fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
        outside, outer = torch.get_rng_state(), tracker._current_state_name
        if outer in tracker.states_:
            tracker.states_[outer].set_state(outside)
        torch.set_rng_state(tracker.states_[name].get_state())
        tracker._current_state_name = name
        try:
            yield
        finally:
            tracker.states_[name].set_state(torch.get_rng_state())
            tracked = tracker.states_.get(outer)
            torch.set_rng_state(outside if tracked is None else tracked.get_state())
            tracker._current_state_name = outer

    for name, function in zip(names, (add, fork), strict=True):
        setattr(kind, name, function)
    try:
        yield
    finally:
        for name, function in zip(names, usual, strict=True):
            setattr(kind, name, function)


def draws_from_generators() -> dict[str, list[float]]:
    with tracked_generators():
        found = draws()
        assert all(isinstance(s, torch.Generator) for s in get_cuda_rng_tracker().states_.values())
    get_cuda_rng_tracker().reset()
    return found


@pytest.mark.parametrize("draws", [draws, draws_from_generators], ids=["tensors", "generators"])
def test_every_random_state_has_a_stream_in_every_layer(
    ranks: RankPools, draws: Callable[[], dict[str, list[float]]]
) -> None:
    """On the ranks that Megatron gives equal states, equal numbers."""
    first, second = ranks(2).run(draws)
    for place in ("0:0:0", "1:0:0", "0:1:0", "0:0:1"):
        default, data, expert, tensor = zip(first[place], second[place], strict=True)
        assert default[0] == default[1]
        assert data[0] == data[1]
        assert expert[0] != expert[1]
        assert tensor[0] != tensor[1]
    assert len(set(itertools.chain(*(first[p] for p in first if p != "sequence")))) == 4 * 4
    assert first["sequence"] == first["0:0:0"][3:]
    assert first["sequence"] != second["sequence"]


def train_with_generators(**more: Any) -> Run:
    with tracked_generators():
        try:
            return train(**more)
        finally:
            get_cuda_rng_tracker().reset()


def test_recomputation_draws_the_masks_of_its_forward_from_generators(ranks: RankPools) -> None:
    """A generator moves on in place: what was kept of it must be its state."""
    kept = build("zb-h1", pipeline_size=2, num_microbatches=4)
    order = with_recompute_offload(kept, seed=1, recompute=0.7)
    assert order.recomputed
    upstream, ours = Run(), Run()
    for found, schedule in ((upstream, None), (ours, order)):
        more: Any = {"case": DROPOUT, "schedule": schedule, "by_layer": False}
        for run in ranks(2).run(train_with_generators, **more):
            found.add(run)
    check_equal(ours, upstream)
