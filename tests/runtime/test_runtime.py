"""The runtime without a model: queues, memory counting, messages, and the executor."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ranks import RankPools
from toy_layers import Layer, empty_message, layers_of_a_rank, toy_input

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.runtime import link_times
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.runtime.channels import Channels, ShapedChannels
from megatron_zb.runtime.executor import run_program
from megatron_zb.runtime.observer import MemoryRecorder, Observers, Recorder
from megatron_zb.schedules.families import dualpipe_v_order
from megatron_zb.schedules.passes import Channel, Pair, Pass, PassKind

PAIRS = "the published pairs of dualpipe-v"


def test_weight_gradients_run_in_the_order_of_their_layers_and_microbatches() -> None:
    queue, done = WeightGradQueue(), []
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            assert queue.deferring
            for layer in ("last", "first"):
                queue.defer(lambda x, key=(microbatch, layer): done.append(key), torch.ones(1))
    assert not queue.deferring
    queue.run(0)
    assert done == [(0, "last"), (0, "first")]
    queue.run(1)
    assert done[2:] == [(1, "last"), (1, "first")]
    assert len(queue) == 0


def test_a_weight_gradient_out_of_order_is_an_error() -> None:
    queue = WeightGradQueue()
    with queue.collecting(0):
        pass
    with pytest.raises(RuntimeError, match="W of microbatch 1 is due after that of 0"):
        queue.run(1)


def test_deferred_tensors_are_freed_by_w() -> None:
    queue, memory = WeightGradQueue(), ActivationMemory()
    queue.activation_memory = memory
    with queue.collecting(0):
        queue.defer(lambda a, b: None, torch.ones(100), torch.ones(50))
    assert memory.live_bytes == 600
    queue.run(0)
    assert (memory.live_bytes, memory.peak_bytes) == (0, 600)


def test_saved_tensors_are_counted_once_and_until_backward() -> None:
    for excluded, saved in ((True, 2), (False, 3)):
        weight = torch.ones(10, 10, requires_grad=True)
        x = torch.ones(10, 10, requires_grad=True)
        memory = ActivationMemory(exclude=[weight] if excluded else [])
        with memory.watching():
            y = (x @ weight).exp()  # matmul saves x and weight, exp its result
            z = x[0] * y.sum()  # saves a view, which shares the storage of x
        assert memory.live_bytes == saved * 400 + 4  # of y.sum()
        z.sum().backward()
        del y, z
        assert memory.live_bytes == 0
        assert weight.grad is not None


def test_messages_on_their_way_are_live_but_no_pass_holds_them() -> None:
    """Unless a pass does, too; in whichever order both let go of it."""
    memory, sent, kept = ActivationMemory(), torch.ones(100), torch.ones(50)
    for tensor in (sent, sent, kept):  # to two ranks
        memory.hold_sent(tensor)
    memory.hold(kept)
    assert (memory.live_bytes, memory.bytes_of_passes) == (600, 200)
    memory.release_sent(sent)
    assert (memory.live_bytes, memory.bytes_of_passes) == (600, 200)
    memory.release(kept)
    assert (memory.live_bytes, memory.bytes_of_passes) == (600, 0)
    memory.hold(sent)
    memory.release_sent(sent)
    assert (memory.live_bytes, memory.bytes_of_passes) == (600, 400)
    memory.release_sent(kept)
    memory.release(sent)
    assert (memory.live_bytes, memory.bytes_of_passes, memory.peak_bytes) == (0, 0, 600)


class _Emptying(torch.autograd.Function):
    """Empties what it has used, as some of Transformer-Engine's backwards do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (saved,) = ctx.saved_tensors
        result = grad * saved
        saved.data = torch.empty(0)
        return result


def test_a_saved_tensor_that_is_emptied_is_no_longer_counted() -> None:
    memory = ActivationMemory()
    with memory.watching():
        y = _Emptying.apply(torch.ones(10, 10, requires_grad=True))
    assert memory.live_bytes == 400
    y.sum().backward()
    assert memory.live_bytes == 0


def gradients_of_a_pipeline(name: str, num_microbatches: int) -> dict[int, torch.Tensor]:
    """One layer per stage, trained one step under a schedule: the gradient of each stage held."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if name == PAIRS:
        schedule = dualpipe_v_order(world_size, num_microbatches)
    else:
        schedule = schedules.build(
            name, pipeline_size=world_size, num_microbatches=num_microbatches
        )
    channels = Channels(list(range(world_size)), schedule.placement, "cpu")
    layers, stages = layers_of_a_rank(schedule.placement)
    program = schedules.lower(schedule)
    for _ in range(2):  # a second step finds nothing left over from the first
        for layer in layers.values():
            layer.gradient.zero_()
        run_program(program, rank, stages, channels, empty_message)
    channels.close()
    return {stage: layer.gradient for stage, layer in layers.items()}


FEW = ("1f1b", "interleaved", "zb-h1", "v-half")
"""Schedules that run fewer microbatches than they have ranks in every run, too."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_microbatches"),
    [
        pytest.param(name, m, marks=() if m == 7 or name in FEW else pytest.mark.full)
        for name in schedules.names()
        for m in (1, 2, 7)
    ],
)
def test_the_executor_trains_like_one_process(
    ranks: RankPools, name: str, num_microbatches: int
) -> None:
    check_gradients(ranks, name, num_microbatches)


@pytest.mark.parametrize("num_microbatches", [8, 11])
def test_both_outputs_of_a_pair_reach_their_readers(
    ranks: RankPools, num_microbatches: int
) -> None:
    """The stages of these layers run a pair's F, then its BW."""
    check_gradients(ranks, PAIRS, num_microbatches)


def check_gradients(ranks: RankPools, name: str, num_microbatches: int) -> None:
    found = ranks(4).run(gradients_of_a_pipeline, name=name, num_microbatches=num_microbatches)
    gradients = {stage: g for of_rank in found for stage, g in of_rank.items()}
    queue = WeightGradQueue()
    layers = [Layer(stage, queue) for stage in range(len(gradients))]
    for microbatch in range(num_microbatches):
        x = toy_input(microbatch).requires_grad_()
        for layer in layers:
            x = layer(x)
        x.square().sum().backward()
    for stage, layer in enumerate(layers):
        assert torch.equal(gradients[stage], layer.gradient)


def test_recorders_are_told_of_a_pair_as_one() -> None:
    """Its seconds are one span; what its passes hold cannot be told apart and is left out."""
    pair = Pair(Pass(PassKind.F, 0, 1), Pass(PassKind.BW, 0, 0))
    recorder, memory = Recorder(), MemoryRecorder(ActivationMemory())
    observer = Observers([recorder, memory])
    for work in (pair, pair.forward):
        with observer.running(work):
            pass
    assert [span.of for span in recorder.spans()] == [pair, pair.forward]
    assert memory.changes == {pair.forward: 0}


class Grower:
    """A stage that makes its message one longer, and another shape for every microbatch."""

    def __init__(self, is_last: bool, seen: list[tuple[int, ...]]) -> None:
        self.is_last, self.seen = is_last, seen
        self._read: dict[int, tuple[int, ...]] = {}

    def forward(self, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        if x is None:
            return torch.zeros([microbatch] * (microbatch % 3 + 1))
        self.seen.append(tuple(x.shape))
        self._read[microbatch] = tuple(x.shape)
        if self.is_last:
            return None
        return torch.cat([x, torch.zeros_like(x[:1])]) if x.dim() > 1 else x

    def backward(self, microbatch: int, x: torch.Tensor | None) -> torch.Tensor | None:
        if x is not None:
            self.seen.append(tuple(x.shape))
        return torch.zeros(self._read[microbatch]) if microbatch in self._read else None

    backward_input = backward

    def backward_weight(self, microbatch: int) -> None:
        pass


def shapes_seen(name: str, num_microbatches: int) -> list[list[tuple[int, ...]]]:
    """The shapes that each stage of this rank has read, over channels that are told none."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    schedule = schedules.build(name, pipeline_size=world_size, num_microbatches=num_microbatches)
    held = schedule.placement.stages_of[rank]
    last = schedule.placement.num_stages - 1
    seen: dict[int, list[tuple[int, ...]]] = {stage: [] for stage in held}
    stages = {stage: Grower(stage == last, seen[stage]) for stage in held}
    channels, headers = (
        Channels(list(range(world_size)), schedule.placement, "cpu") for _ in range(2)
    )
    program = schedules.lower(schedule)
    for _ in range(2):
        shaped = ShapedChannels(channels, headers, schedule.placement.num_stages)
        run_program(program, rank, stages, shaped, lambda message: torch.empty(()))
    channels.close()
    headers.close()
    return [sorted(seen[stage]) for stage in held]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "v-half", "v-zb"])
def test_messages_of_any_shape_arrive(ranks: RankPools, name: str) -> None:
    microbatches = 6
    placement = schedules.build(name, pipeline_size=4, num_microbatches=microbatches).placement
    found = ranks(4).run(shapes_seen, name=name, num_microbatches=microbatches)

    def read(stages_before: int, microbatch: int) -> tuple[int, ...]:
        """The shape of a message after so many stages: those of several dimensions grow."""
        dimensions = microbatch % 3 + 1
        grown = stages_before - 1 if dimensions > 1 and microbatch > 0 else 0
        return (microbatch + grown, *[microbatch] * (dimensions - 1))

    for rank, held in enumerate(placement.stages_of):
        for stage, seen in zip(held, found[rank], strict=True):
            is_last = stage == placement.num_stages - 1
            # a gradient has the shape of what the stage has made
            read_after = [*([stage] if stage else []), *([] if is_last else [stage + 1])]
            expected = [read(n, m) for n in read_after for m in range(microbatches)]
            assert seen == sorted(2 * expected), (rank, stage)


def test_an_operand_that_is_overwritten_before_w_is_an_error() -> None:
    """Also through another tensor of the same memory, as a custom backward does it."""
    queue, done = WeightGradQueue(), list[int]()
    gradient = torch.ones(3)
    for microbatch in range(2):
        with queue.collecting(microbatch):
            queue.defer(lambda x: done.append(int(x.sum())), gradient.detach(), layer="mlp.fc1")
    queue.run(0)
    gradient.view(3)[0] = 5.0
    with pytest.raises(UsageError, match=r"^an operand of the weight gradient of mlp.fc1 was "):
        queue.run(1)
    assert done == [3]


def test_what_a_weight_gradient_needs_is_prepared_beside_the_one_before() -> None:
    """In their order, so that the first does not wait for what the second needs."""
    queue, said = WeightGradQueue(), list[str]()
    with queue.collecting(0):
        for number in range(3):
            queue.defer(
                partial(said.append, f"compute {number}"),
                prepare=partial(said.append, f"prepare {number}"),
            )
    assert not said
    queue.run(0)
    prepared, computed = [f"prepare {i}" for i in range(3)], [f"compute {i}" for i in range(3)]
    assert said == [*prepared[:2], computed[0], prepared[2], *computed[1:]]


def test_a_sum_of_gradients_is_waited_for_on_its_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for the whole device would also wait for what others have left open there."""
    did: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: did.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: did.append("device"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: did.append("barrier"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: did.append("sum"))
    clock = iter([2.0, 5.0])
    monkeypatch.setattr(link_times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    tensor: Any = SimpleNamespace(is_cuda=True, device="cuda:0")
    assert link_times._seconds_to_sum(tensor) == 3.0
    assert did == ["barrier", "sum", "stream"]


def test_an_answer_is_compared_with_the_middle_of_its_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The round of 2 seconds is the fastest: 6 is its middle, and the answer says 6.5."""
    clock = iter([1.0, 4.0, 5.0, 7.0, *[9.0, 19.0] * (link_times._ROUNDS - 2)])
    monkeypatch.setattr(link_times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    channels: Any = MagicMock()
    channels.take.return_value = torch.tensor([6.5])
    found = link_times._fastest_round(channels, Channel(0, 1), True, lambda: torch.zeros(1))
    assert found == (2.0, 0.5)
