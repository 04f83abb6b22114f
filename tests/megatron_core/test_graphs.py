"""CUDA graphs: the order of their capture, and what runs beside them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import capture_stand_in
import gpt_cases
import graph_stand_in
import pytest
import torch
from drawn_sizes import every_value
from gpt_cases import (
    GPTCase,
    built,
    forward_backward,
    gradients,
    microbatches,
    optimizer,
    parameters,
    run,
)
from joined_pairs import joined
from megatron.core import optimizer as megatron_optimizer
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from megatron.core.transformer.cuda_graphs import (
    TECudaGraphHelper,
    convert_schedule_table_to_order,
    get_overlap_moe_expert_parallel_comm_order,
)
from megatron.core.transformer.enums import CudaGraphScope
from megatron.core.utils import get_model_config
from model_options import EXPERTS, options
from rank_process import Kind
from ranks import RankPools
from te_models import layers_of_te, quantized

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.connections import ChannelsPart, WatchPart
from megatron_zb.megatron_core.graphs import layer_order, pass_order
from megatron_zb.megatron_core.refusals import check_step
from megatron_zb.megatron_core.versions import Graphs, graphs_of
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.progress import RankProgress
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.families import overlapped
from megatron_zb.schedules.passes import Channel, Message, Pass, PassKind


def _megatrons_order(p: int, rank: int, m: int, chunks: int, group: int) -> list[int]:
    pipeline = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: p, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    warmup = get_pp_rank_microbatches(m, chunks, group, p2p_communicator=pipeline)[2]
    table = get_schedule_table(m, chunks, group)
    return convert_schedule_table_to_order(warmup, chunks, table)


@pytest.mark.parametrize(
    ("p", "m", "chunks"),
    [(2, 2, 2), (2, 8, 2), (4, 4, 2), (4, 8, 3), (4, 16, 4), (8, 16, 2), (4, 8, 1), (8, 3, 1)],
)
def test_graphs_are_captured_in_megatrons_order_under_its_own_schedule(
    p: int, m: int, chunks: int
) -> None:
    name = "interleaved" if chunks > 1 else "1f1b"
    asked = chunks if chunks > 1 else None
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=m, chunks=asked)
    for rank in range(p):
        assert pass_order(schedule, rank) == _megatrons_order(p, rank, m, chunks, p)


@pytest.mark.parametrize(
    ("p", "m", "layers"),
    [(2, 2, (1, 1)), (2, 8, (2, 3)), (4, 8, (4, 2)), (4, 8, (1, 2, 3)), (8, 16, (2, 2))],
)
def test_graphs_of_layers_are_captured_in_megatrons_order_of_pairs(
    p: int, m: int, layers: tuple[int, ...]
) -> None:
    chunks = len(layers)
    schedule = overlapped(p, m, chunks, p)
    for rank in range(p):
        order = _megatrons_order(p, rank, m, chunks, p)
        by_layer = get_overlap_moe_expert_parallel_comm_order(order, layers, False)
        assert layer_order(schedule, rank, [[True] * count for count in layers]) == by_layer


def test_layers_without_graphs_take_their_turns_in_a_pair() -> None:
    schedule = joined(schedules.build("v-half", pipeline_size=2, num_microbatches=4))
    assert schedule.pairs
    is_graphed = [[False, True, True], [True, False]]
    f, rank = next(
        (p, rank) for rank in (0, 1) for p in schedule.ranks[rank] if p in schedule.pairs
    )
    place = schedule.ranks[rank].index(f)
    alone = replace(schedule, ranks=(schedule.ranks[rank][place : place + 2],) * 2)
    turns = {  # chunks of the forward and of the backward
        (0, 0): [-2, 1, -1, 2],
        (0, 1): [1, -3, 2],
        (1, 0): [3, -2, -1],
        (1, 1): [3, -3],
    }
    chunk_of = schedule.placement.chunk_of
    backward = schedule.ranks[rank][place + 1]
    expected = turns[chunk_of(f.stage), chunk_of(backward.stage)]
    assert layer_order(alone, rank, is_graphed)[0] == expected


@pytest.mark.parametrize("name", ["zb-h1", "v-half", "v-zb", "interleaved", "wave", "1f1b-v"])
def test_a_graph_is_captured_for_every_pass_but_w(name: str) -> None:
    """Both directions of a chunk come in the order of the microbatches, as graphs count them."""
    schedule = schedules.build(name, pipeline_size=4, num_microbatches=8)
    chunks = schedule.placement.chunks
    for rank, passes in enumerate(schedule.ranks):
        order = pass_order(schedule, rank)
        assert order[0] == 1
        for chunk in range(1, chunks + 1):
            done = [entry for entry in order if abs(entry) == chunk]
            assert done.count(chunk) == done.count(-chunk) == 8
            stage = schedule.placement.stages_of[rank][chunk - 1]
            for kinds in ("F", ("B", "BW")):
                numbers = [
                    p.microbatch for p in passes if p.stage == stage and p.kind.name in kinds
                ]
                assert numbers == list(range(8))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, Graphs.NONE),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": ["full_iteration"]}, Graphs.NONE),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full"}, Graphs.LOCAL),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, Graphs.FULL_ITERATION),
        (
            {
                "cuda_graph_impl": "local",
                "cuda_graph_scope": [SimpleNamespace(name="full_iteration")],
            },
            Graphs.FULL_ITERATION,
        ),
        ({"cuda_graph_impl": "full_iteration"}, Graphs.FULL_ITERATION),
        ({"enable_cuda_graph": True, "cuda_graph_impl": "none"}, Graphs.LOCAL),
        ({"external_cuda_graph": True, "cuda_graph_impl": "none"}, Graphs.TRANSFORMER_ENGINE),
        ({"cuda_graph_impl": "transformer_engine"}, Graphs.TRANSFORMER_ENGINE),
    ],
)
def test_the_graphs_of_both_versions_are_told_apart(settings: dict[str, Any], kind: Graphs) -> None:
    assert graphs_of(SimpleNamespace(**settings)) is kind


# Graphs of layers.

CASE = GPTCase(dtype="bfloat16", layers=8, data_parallel=2, overlap_grad_reduce=True)
FUSED = replace(CASE, fused_accumulation=True)
MICROBATCHES = 5
LOCAL_LAYERS = gpt_cases._specification

Step = tuple[list[float], dict[str, torch.Tensor]]


def _steps(case: GPTCase, schedule: str, scope: str | None) -> list[Step]:
    """Losses of steps, with those of evaluations, and their gradients, or weights if they change.

    With a scope of graphs, they are captured after the first step.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    captured = options(cuda_graph_impl="transformer_engine", cuda_graph_scope=scope)
    graphed = replace(case, options=(*case.options, *(captured if scope else ())))
    found = []
    with (
        built(graphed, schedule, MICROBATCHES) as (adapter, chunks),
        graph_stand_in.installed(MICROBATCHES) as pool,
    ):
        assert adapter is not None
        adam = optimizer(case, chunks) if case.optimizer_steps else None
        for step in range(case.optimizer_steps or 2):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            losses = _losses(case, adapter, chunks)
            if adam is not None:
                adam.step()
            results = dict(parameters(case, chunks) or gradients(chunks))
            if scope and step == 0:
                adapter.create_graphs(TECudaGraphHelper(chunks, get_model_config(chunks[0]), 16, 2))
            if step < 2:  # not after the others: it quantises what the next step has to
                with torch.no_grad():
                    losses += _losses(case, adapter, chunks, forward_only=True)
            found.append((losses, results))
        assert pool.replayed == pool.captured * step
        assert len(pool.captured) >= (2 * 2 * MICROBATCHES if scope else 0), "too few"
    return found


def _losses(
    case: GPTCase, adapter: Any, chunks: list[Any], forward_only: bool = False
) -> list[float]:
    for chunk in chunks:
        chunk.train(not forward_only)
    data = [microbatches(case, MICROBATCHES) for _ in chunks]
    function = adapter.forward_backward_func
    records = forward_backward(function, chunks, data, MICROBATCHES, forward_only=forward_only)
    return [float(record["lm loss"]) for record in records]


def _graphed(case: GPTCase, schedule: str, scope: str, of_te: bool) -> list[str]:
    """What steps have other, before and after the capture, than those without graphs."""
    gpt_cases._specification = layers_of_te if of_te else LOCAL_LAYERS
    megatron_optimizer.Adam = torch.optim.AdamW  # in place of kernels
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
    found = []
    expected, steps = (_steps(case, schedule, one) for one in (None, scope))
    for number, (without, with_graphs) in enumerate(zip(expected, steps, strict=True)):
        if with_graphs[0] != without[0]:
            found.append(f"losses of step {number}: {with_graphs[0]}, not {without[0]}")
        found += [
            f"{name} of step {number}"
            for name, tensor in with_graphs[1].items()
            if not torch.equal(tensor, without[1][name])
        ]
    return found


GRAPHED = {
    "layers": (CASE, "full", False),
    "attention-te": (CASE, "attn", True),
    "attention-te-fused": (FUSED, "attn", True),
    "mlp-te-fused": (FUSED, "mlp", True),
}
SCHEDULES = ["v-half", "v-zb", "zb-h1", "interleaved"]
IN_SEVERAL_CHUNKS = ["v-half", "v-zb", "interleaved"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), every_value([*GRAPHED], SCHEDULES, most=4))
def test_graphs_of_layers_give_what_megatron_gives(
    ranks: RankPools, name: str, schedule: str
) -> None:
    """The same schedule without graphs gives it, too; see test_gradient_parity.py."""
    case, scope, of_te = GRAPHED[name]
    pool = ranks(4, Kind.TRANSFORMER_ENGINE)
    found = pool.run(_graphed, case=case, schedule=schedule, scope=scope, of_te=of_te)
    assert found == [[]] * 4


IN_PAIRS = replace(
    CASE,
    expert_parallel=2,
    overlap_grad_reduce=False,
    all_to_all_overlaps=True,
    options=tuple(EXPERTS.items()),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "name"),
    every_value(["attn,moe_router", "attn", "moe_router"], IN_SEVERAL_CHUNKS, most=1),
)
def test_graphs_of_layers_in_pairs_give_what_megatron_gives(
    ranks: RankPools, scope: str, name: str
) -> None:
    schedule = joined(schedules.build(name, pipeline_size=2, num_microbatches=MICROBATCHES))
    pool = ranks(4, Kind.TRANSFORMER_ENGINE)
    found = pool.run(_graphed, case=IN_PAIRS, schedule=schedule, scope=scope, of_te=False)
    assert found == [[]] * 4


ONE_REPLICA = replace(FUSED, data_parallel=1, layers=4)
QUANTIZED = {
    "attention-current": (quantized("fp8", "tensorwise", ONE_REPLICA), "attn"),
    "layers-delayed": (quantized("fp8", "delayed", ONE_REPLICA), "full"),
    "mlp-mxfp8": (quantized("fp8", "mxfp8", ONE_REPLICA), "mlp"),
    "layers-blockwise": (quantized("fp8", "blockwise", ONE_REPLICA), "full"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), every_value([*QUANTIZED], SCHEDULES, most=2))
def test_quantized_graphs_give_what_megatron_gives(
    ranks: RankPools, name: str, schedule: str
) -> None:
    """The same schedule without graphs gives it, too; see test_te_models.py."""
    case, scope = QUANTIZED[name]
    case = replace(case, optimizer_steps=4)  # of which three have graphs
    pool = ranks(2, Kind.TRANSFORMER_ENGINE)
    found = pool.run(_graphed, case=case, schedule=schedule, scope=scope, of_te=True)
    assert found == [[]] * 2


def _another_count(schedule: str) -> str:
    captured = options(cuda_graph_impl="transformer_engine", cuda_graph_scope="full")
    case = GPTCase(dtype="bfloat16", layers=4, options=captured)
    with built(case, schedule, 4) as (adapter, chunks):
        assert adapter is not None
        function = adapter.forward_backward_func
        with graph_stand_in.installed(4):
            adapter.create_graphs(TECudaGraphHelper(chunks, get_model_config(chunks[0]), 16, 2))
            for count, forward_only in ((4, False), (2, True), (3, False)):
                for chunk in chunks:
                    chunk.train(not forward_only)
                data = [microbatches(case, count) for _ in chunks]
                try:
                    forward_backward(function, chunks, data, count, forward_only=forward_only)
                except UsageError as error:
                    return f"{count} microbatches: {error}"
    return "nothing was refused"


def test_graphs_are_for_one_number_of_microbatches(ranks: RankPools) -> None:
    said = "cannot be combined with the pipeline schedule v-half: graphs are "
    said += "captured for one number of microbatches"
    expected = f"3 microbatches: CUDA graphs (transformer_engine) {said}"
    pool = ranks(2, Kind.TRANSFORMER_ENGINE)
    assert pool.run(_another_count, schedule="v-half") == [expected] * 2


class _Mark:
    """In place of a CUDA event that has not happened."""

    def record(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        raise AssertionError("a query would invalidate the capture")


def _in_step_at_capture() -> tuple[bool, bool]:
    """Whether marks of a step are left, which a watchdog would ask for, before and in a capture."""
    with built(GPTCase(), "v-half", MICROBATCHES) as (adapter, chunks):
        assert adapter is not None
        adapter.part(WatchPart).progress = progress = RankProgress(on_gpu=True, event=_Mark)
        progress._event = _Mark
        with progress.step(), progress.running(Pass(PassKind.F, 0, 0)):
            pass
        before, seen = progress.in_step, list[bool]()
        helper = SimpleNamespace(config=get_model_config(chunks[0]), flattened_callables=[])
        adapter.create_graphs(helper, lambda helper: seen.append(progress.in_step))
        return before, seen[0]


def test_nothing_is_asked_of_the_device_while_graphs_are_captured(ranks: RankPools) -> None:
    assert ranks(2).run(_in_step_at_capture) == [(True, False)] * 2


# Graphs of whole iterations.


def _captured(case: GPTCase, schedule: str | Schedule, forward_only: bool) -> list[str]:
    """What a step and one that is captured have other than the same schedule without graphs."""
    gpt_cases._specification = LOCAL_LAYERS
    expected = run(case, schedule, [MICROBATCHES], forward_only)[MICROBATCHES]
    found = []
    with (
        built(case, schedule, MICROBATCHES) as (adapter, chunks),
        capture_stand_in.installed(),
    ):
        assert adapter is not None
        config = get_model_config(chunks[0])  # building with these needs the generators of a GPU
        config.cuda_graph_impl, config.cuda_graph_scope = "local", [CudaGraphScope.full_iteration]
        function = FullCudaGraphWrapper(adapter.forward_backward_func)
        for step in range(3):
            if step < 2:  # what stands in for a graph has run when it was captured
                for chunk in chunks:
                    chunk.zero_grad_buffer()
            data = [microbatches(case, MICROBATCHES) for _ in chunks]
            losses = forward_backward(
                function, chunks, data, MICROBATCHES, forward_only=forward_only
            )
            if [float(loss["lm loss"]) for loss in losses] != expected.losses:
                found.append(f"losses of step {step}")
            found += [
                f"{name} of step {step}"
                for name, gradient in gradients(chunks)
                if not torch.equal(gradient, expected.gradients[name])
            ]
        channels = adapter.part(ChannelsPart).channels
        assert channels is not None
        if any(channels._sends.values()):
            found.append("messages left")
        if (function.cuda_graph["validation" if forward_only else "training"]) is None:
            found.append("nothing was captured")
    return found


WHOLE = GPTCase(tied=True, data_parallel=2, overlap_grad_reduce=True)


@pytest.mark.parametrize(
    ("schedule", "forward_only"),
    every_value(["v-half", "v-zb", "zb-h1", "interleaved"], [False, True]),
)
def test_a_captured_step_gives_the_same_and_asks_nothing(
    ranks: RankPools, schedule: str, forward_only: bool
) -> None:
    found = ranks(4).run(_captured, case=WHOLE, schedule=schedule, forward_only=forward_only)
    assert found == [[]] * 4


def test_a_captured_step_may_have_pairs(ranks: RankPools) -> None:
    """Experts that are padded to their capacity ask the device nothing, one on each rank."""
    padded = {
        "num_moe_experts": 2,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    }
    case = GPTCase(
        dtype="bfloat16",
        data_parallel=2,
        expert_parallel=2,
        overlap_grad_reduce=True,
        all_to_all_overlaps=True,
        options=tuple((EXPERTS | padded).items()),
    )
    order = schedules.build("v-half", pipeline_size=2, num_microbatches=MICROBATCHES)
    schedule = joined(order)
    assert schedule.pairs
    found = ranks(4).run(_captured, case=case, schedule=schedule, forward_only=False)
    assert found == [[]] * 4


def test_receives_stay_on_the_stream_that_is_captured() -> None:
    """A CPU has no stream: what stands for that of the receives may not be touched."""
    channels = Channels.__new__(Channels)
    channels._prepare(torch.device("cpu"))
    apart = channels._receiving = object()
    message = Message(False, 1, 0)
    work: Any = SimpleNamespace(wait=lambda: None)
    channels._irecv = lambda channel, buffer: work  # type: ignore[method-assign]
    with capture_stand_in.asking_nothing(), channels.capturing(True):
        channels.post_receive(Channel(0, 1), message, lambda: torch.zeros(1))
        channels.between_passes()
        assert channels.take(message).shape == (1,)
        channels.finish()
    assert channels._receiving is apart
    with capture_stand_in.asking_nothing(), pytest.raises(capture_stand_in.Asked):
        channels.between_passes()


@pytest.mark.parametrize(
    "settings", [{"variable_seq_lengths": True}, {"cuda_graph_warmup_steps": 0}]
)
def test_what_no_step_can_be_captured_with(settings: dict[str, Any]) -> None:
    config = {"variable_seq_lengths": False, "cuda_graph_warmup_steps": 1}
    whole = {"cuda_graph_impl": "full_iteration", **config}
    check_step(SimpleNamespace(**whole), "v-half")
    with pytest.raises(UsageError, match=r"^CUDA graphs .full_iteration. .* v-half: "):
        check_step(SimpleNamespace(**{**whole, **settings}), "v-half")
    check_step(SimpleNamespace(**{**config, **settings}), "v-half")


@pytest.mark.parametrize(
    "fact", ["draws_by_layer", "is_measured", "is_validated_later", "has_another_order"]
)
def test_a_step_is_refused_with_what_a_graph_cannot_hold(fact: str) -> None:
    config = SimpleNamespace(cuda_graph_impl="transformer_engine")
    with pytest.raises(UsageError, match=r"^CUDA graphs .transformer_engine. .* v-half: "):
        check_step(config, "v-half", facts={fact: True})
    check_step(config, "v-half", facts={fact: False})
    none = SimpleNamespace(cuda_graph_impl="none")
    check_step(none, "v-half", facts={fact: True})
