"""Copy engines: those of a CPU, and what those of a GPU ask of CUDA, with noting stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from random import Random
from threading import Semaphore
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st

from megatron_zb.runtime import activation_memory
from megatron_zb.runtime.activation_memory import (
    HostMemory,
    OffloadedActivations,
    Segment,
    StreamEngines,
    ThreadEngines,
    engines_of,
)


def test_a_cpu_copies_each_way_in_turn_and_both_ways_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies end on request: `begin` blocks neither the caller nor the other direction."""
    asked: Queue[float] = Queue()
    let_go = Semaphore(0)

    def last(seconds: float) -> None:
        asked.put(seconds)
        assert let_go.acquire(timeout=60)

    monkeypatch.setattr(activation_memory, "time", SimpleNamespace(sleep=last))
    engines = ThreadEngines(seconds_per_byte=1e-5)
    here, there, back, later = (torch.full((4096,), i, dtype=torch.uint8) for i in range(4))
    waits = [
        engines.begin([(there, here)], to_host=True),
        engines.begin([(later, here)], to_host=True),
        engines.begin([(back, here)], to_host=False),
    ]
    assert [asked.get(timeout=60) for _ in range(2)] == pytest.approx([0.04096, 0.04096])
    assert torch.equal(there, here)
    assert torch.equal(back, here)
    assert torch.all(later == 3), "the second copy one way waits for the first"
    for _ in range(3):
        let_go.release()
    for wait in waits:
        wait()
    assert torch.equal(later, here)


class Cuda:
    """Streams by name, and a note of what each does and waits for."""

    def __init__(self) -> None:
        self.now = "compute"
        self.streams: list[str] = []
        self.notes: list[str] = []

    def make_stream(self, device: Any) -> Stream:
        self.streams.append(f"copy {len(self.streams)}")
        return Stream(self, self.streams[-1])

    def make_event(self) -> Event:
        return Event(self)

    def current_stream(self) -> Stream:
        return Stream(self, self.now)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self.cuda.notes.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.cuda.notes.append(f"{self.name} waits for the event of {event.of}")


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def record(self) -> None:
        self.of = self.cuda.now
        self.cuda.notes.append(f"{self.of} records an event")


class Bytes:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def copy_(self, source: Bytes, *, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        self.cuda.notes.append(f"{self.cuda.now} copies")


def test_a_gpu_copies_beside_its_computation_and_the_host_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda()
    for name, stand_in in (
        ("Stream", cuda.make_stream),
        ("Event", cuda.make_event),
        ("current_stream", cuda.current_stream),
        ("stream", cuda.stream),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    engines: Any = engines_of(torch.device("cuda"))
    assert isinstance(engines, StreamEngines)
    pair: Any = (Bytes(cuda), Bytes(cuda))
    out = engines.begin([pair, pair], to_host=True)
    back = engines.begin([pair], to_host=False)
    out()
    back()
    assert cuda.notes == [
        "copy 0 waits for compute",
        "copy 0 copies",
        "copy 0 copies",
        "copy 0 records an event",
        "copy 1 waits for compute",
        "copy 1 copies",
        "copy 1 records an event",
        "compute waits for the event of copy 0",
        "compute waits for the event of copy 1",
    ]


def test_what_is_saved_comes_back_once_however_often_it_is_saved() -> None:
    host = HostMemory(torch.device("cpu"))
    weight = torch.nn.Parameter(torch.randn(32, 32))
    activations = OffloadedActivations(host, [weight])
    given = torch.randn(32, 32, requires_grad=True)

    def computed() -> torch.Tensor:
        inner = torch.tanh(given @ weight)
        return (inner * inner.t() + inner[3:5].sum()).sum()

    (expected,) = torch.autograd.grad(computed(), given)
    for _ in range(2):  # buffers of the host are used again
        with activations.saving(0):
            output = computed()
        activations.begin_copy_out(0)
        activations.end_copy_out(0)
        activations.begin_copy_in(0)
        activations.end_copy_in(0)
        (gradient,) = torch.autograd.grad(output, given)
        assert torch.equal(gradient, expected)
    # tanh's output, which its views share, and the input of the product; the weight stays
    assert host.taken_bytes == 2 * 32 * 32 * 4
    assert host.used_bytes == 0


def test_what_all_microbatches_save_is_offloaded_for_the_first_alone() -> None:
    """A table that its owner keeps, and that autograd saves in every microbatch."""
    host = HostMemory(torch.device("cpu"))
    activations = OffloadedActivations(host)
    table = torch.randn(32, 32)
    given = [torch.randn(32, 32, requires_grad=True) for _ in range(3)]
    outputs = []
    for microbatch, one in enumerate(given):
        with activations.saving(microbatch):
            outputs.append((torch.tanh(one) * table).sum())
        activations.begin_copy_out(microbatch)
        # tanh's output, and with the first the table
        assert host.used_bytes == (microbatch + 2) * 32 * 32 * 4
        activations.end_copy_out(microbatch)
    for microbatch, one in enumerate(given):
        activations.begin_copy_in(microbatch)
        activations.end_copy_in(microbatch)
        (gradient,) = torch.autograd.grad(outputs[microbatch], one)
        torch.testing.assert_close(gradient, table * (1 - torch.tanh(one) ** 2))


def test_an_activation_at_the_address_of_an_earlier_one_is_offloaded() -> None:
    host = HostMemory(torch.device("cpu"))
    activations = OffloadedActivations(host)
    for microbatch in range(20):  # storages that have gone leave their addresses to others
        with activations.saving(microbatch):
            torch.ones(64, requires_grad=True).exp()
        activations.begin_copy_out(microbatch)
        activations.end_copy_out(microbatch)
        assert host.used_bytes == 512 * (microbatch + 1)


def test_what_is_forgotten_gives_its_memory_back() -> None:
    host = HostMemory(torch.device("cpu"))
    activations = OffloadedActivations(host)
    with activations.saving(0):
        torch.ones(64, requires_grad=True).exp()
    activations.begin_copy_out(0)
    assert host.used_bytes == 512
    activations.reset()
    assert host.used_bytes == 0


class InPieces(ThreadEngines):
    piece: int | None = 4096


@settings(deadline=None)
@given_by(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_memory_of_the_host_is_what_is_in_use_at_a_time(sizes: list[int], rng: Random) -> None:
    """To a whole piece, whatever lengths come one after the other; no two units share a byte."""
    host, most = HostMemory(torch.device("cpu"), InPieces()), 0
    live: list[tuple[int, list[Segment]]] = []
    for number, size in enumerate(sizes):
        while live and rng.random() < 0.5:
            written, parts = live.pop(rng.randrange(len(live)))
            assert all(bool((host.bytes_of(part) == written).all()) for part in parts)
            host.give_back(parts)
        parts = host.take(512 * size)
        assert sum(end - start for _, start, end in parts) == 512 * size
        for part in parts:
            host.bytes_of(part).fill_(number)
        live.append((number, parts))
        most = max(most, host.used_bytes)
    assert host.used_bytes == sum(end - start for _, of in live for _, start, end in of)
    assert host.taken_bytes == -(-most // 4096) * 4096


def test_pinned_memory_is_asked_for_in_powers_of_two() -> None:
    """To which torch rounds it up: what is counted is what is taken."""
    piece = StreamEngines.piece
    assert piece is not None
    assert piece == 2 ** (piece.bit_length() - 1)


def test_offloaded_activations_lie_in_parts_of_pieces() -> None:
    host = HostMemory(torch.device("cpu"), InPieces())
    activations, given = OffloadedActivations(host), torch.randn(50, 50, requires_grad=True)
    with activations.saving(0):
        output = given.exp().tanh().sum()
    activations.begin_copy_out(0)
    activations.end_copy_out(0)
    activations.begin_copy_in(0)
    activations.end_copy_in(0)
    (gradient,) = torch.autograd.grad(output, given)
    (expected,) = torch.autograd.grad(given.exp().tanh().sum(), given)
    assert torch.equal(gradient, expected)
    assert host.taken_bytes == 5 * 4096
