"""What channels ask of CUDA's streams and of NCCL, with stand-ins that note it: no GPU is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from recompute_offload import with_recompute_offload

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.connections import group_options
from megatron_zb.runtime.channels import RUN_AHEAD, Channels, GroupOptions
from megatron_zb.runtime.executor import Execution
from megatron_zb.schedules import Schedule
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import LAUNCH_LITTLE, Channel, Message, PassKind

THERE, MESSAGE = Channel(0, 1), Message(False, 1, 0)


class Cuda:
    """One current stream, and a note of what happens on which."""

    def __init__(self) -> None:
        self.current = "compute"
        self.notes: list[tuple[str, str]] = []

    def note(self, what: str) -> None:
        self.notes.append((what, self.current))

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before


class Receives(str):
    """The stream of the receives, which is its name."""

    def __new__(cls, cuda: Cuda) -> Receives:
        return super().__new__(cls, "receives")

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def wait_event(self, event: Any) -> None:
        self._cuda.note(f"receives wait for mark {event.number}")


class Buffer:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        cuda.note("allocate")

    def record_stream(self, stream: str) -> None:
        self._cuda.note(f"keep until {stream} has used it")


class OnGpu(Channels):
    """Channels of a rank with a GPU, whose messages are noted and go nowhere."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._prepare(torch.device("cuda"))

    def _isend(self, channel: Channel, tensor: Any) -> Any:
        self._cuda.note("send")
        return SimpleNamespace(is_completed=lambda: True)

    def _irecv(self, channel: Channel, tensor: Any) -> Any:
        self._cuda.note("receive")
        return SimpleNamespace(wait=lambda: self._cuda.note("wait"))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    events = iter(range(10**6))

    def event(blocking: bool) -> Any:
        number = next(events)
        assert blocking, "a host that waits should leave its core to others"
        return SimpleNamespace(
            number=number,
            record=lambda: cuda.note(f"mark {number}"),
            synchronize=lambda: cuda.note(f"host waits for mark {number}"),
        )

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Receives(cuda))
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.current)
    monkeypatch.setattr(torch.cuda, "Event", event)
    return cuda


def test_a_receive_waits_for_no_computation_and_its_memory_is_safe(cuda: Cuda) -> None:
    channels = OnGpu(cuda)
    buffer: Any = Buffer(cuda)
    cuda.notes.clear()
    channels.post_receive(THERE, MESSAGE, lambda: cuda.note("allocate") or buffer)  # type: ignore[func-returns-value]
    channels.take(MESSAGE)
    channels.send(THERE, torch.zeros(1), 2)
    assert cuda.notes == [
        ("allocate", "receives"),
        ("receive", "receives"),
        ("wait", "compute"),
        ("keep until compute has used it", "compute"),
        ("send", "compute"),
    ]


def test_the_host_runs_ahead_by_a_few_passes_and_no_more(cuda: Cuda) -> None:
    channels = OnGpu(cuda)
    for _ in range(RUN_AHEAD + 2):
        channels.between_passes()
    waited = [what for what, _ in cuda.notes if what.startswith("host")]
    assert waited == ["host waits for mark 0", "host waits for mark 1"]
    channels.finish()
    cuda.notes.clear()
    channels.between_passes()
    assert not any(what.startswith("host") for what, _ in cuda.notes)


def test_a_receive_begins_with_the_pass_behind_which_it_stands(cuda: Cuda) -> None:
    """It would occupy thread blocks from the moment when the host has enqueued it."""
    channels = OnGpu(cuda)
    for _ in range(2):
        channels.between_passes()
    cuda.notes.clear()
    buffer: Any = Buffer(cuda)
    channels.post_receive(THERE, MESSAGE, lambda: buffer)
    assert [what for what, _ in cuda.notes] == [
        "allocate",
        "receives wait for mark 1",
        "receive",
    ]


class Device:
    """A GPU that computes only what the host waits for, and at once where it has nothing else."""

    def __init__(self) -> None:
        self.launched = self.ended = 0
        self.launched_when_idle: list[int] = []

    def run(self, kind: PassKind, *_: Any) -> torch.Tensor:
        if kind not in LAUNCH_LITTLE:
            if self.ended == self.launched:
                self.launched_when_idle.append(self.launched)
            self.launched += 1
        return torch.empty(0)

    def event(self, blocking: bool) -> Any:
        event = SimpleNamespace(behind=0)

        def synchronize() -> None:
            self.ended = max(self.ended, event.behind)

        event.record = lambda: setattr(event, "behind", self.launched)
        event.synchronize = synchronize
        return event


def offloaded() -> Schedule:
    kept = schedules.build("v-half", pipeline_size=4, num_microbatches=12)
    return with_recompute_offload(kept, seed=1, offload=1.0)


def recomputed() -> Schedule:
    kept = schedules.build("v-half", pipeline_size=4, num_microbatches=12)
    return with_recompute_offload(kept, seed=1, recompute=1.0)


def sharded() -> Schedule:
    costs = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    costs = costs.having(Vocabulary(output=0.5, weight=0.25, lookup=0.01))
    return schedules.build("v-half", pipeline_size=4, num_microbatches=12, costs=costs)


@pytest.mark.parametrize("make", [offloaded, recomputed, sharded])
def test_the_host_does_not_wait_until_the_device_has_nothing_to_do(
    make: Callable[[], Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes that launch next to nothing do not count as being ahead."""
    schedule = make()
    program = schedules.lower(schedule)
    stages = dict.fromkeys(range(schedule.placement.num_stages + 4))
    for rank in range(4):
        device, channels = Device(), OnDevice()
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        handlers = {kind: partial(device.run, kind) for kind in PassKind.all()}
        execution = Execution(2, stages, channels, Mock(), handlers=handlers)
        execution.run(program.ranks[rank])
        assert device.launched > 36
        assert device.launched_when_idle == [0]


class OnDevice(OnGpu):
    """Channels whose messages cost nothing."""

    def __init__(self) -> None:
        Channels._prepare(self, torch.device("cpu"))
        self._receiving = Mock()

    def post_receive(self, *_: Any) -> None:
        """Nothing comes."""

    def take(self, message: Any) -> torch.Tensor:
        return torch.empty(0)

    def send(self, *_: Any) -> None:
        """Nothing goes."""


class Options:
    """In the place of ProcessGroupNCCL.Options, which a torch without CUDA lacks."""

    def __init__(self) -> None:
        self.is_high_priority_stream = False
        self.config = SimpleNamespace(max_ctas=0, min_ctas=0)


def applied(options: GroupOptions, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    made = options.for_backend("cpu:gloo,cuda:nccl")
    chosen = {name: value for name, value in vars(made.config).items() if value}
    return {"is_high_priority_stream": made.is_high_priority_stream, **chosen}


def test_an_option_that_nccl_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no option 'max_ctas_' in torch .*: take it out of pp"):
        applied(GroupOptions(nccl={"max_ctas_": 4}), monkeypatch)


def test_links_of_a_sharded_vocabulary_have_one_thread_block_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank has two for every other rank; that of a user's settings is for the usual links."""
    given = GroupOptions(nccl={"min_ctas": 6, "max_ctas": 6, "is_high_priority_stream": True})
    expected = {"is_high_priority_stream": True, "max_ctas": 1}
    assert applied(given.with_one_block(), monkeypatch) == expected


def test_nccl_is_asked_for_few_thread_blocks_on_a_stream_of_high_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert applied(GroupOptions(), monkeypatch) == {"is_high_priority_stream": True, "max_ctas": 2}
    assert GroupOptions().for_backend("gloo") is None


def test_megatrons_settings_of_the_pipeline_group_come_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text("dp: {max_ctas: 9}\npp: {min_ctas: 6, is_high_priority_stream: false}\n")
    expected = {"is_high_priority_stream": False, "min_ctas": 6, "max_ctas": 6}
    assert applied(group_options(str(path)), monkeypatch) == expected
    with_priority = applied(group_options(str(path), ["dp_cp", "pp"]), monkeypatch)
    assert with_priority == {**expected, "is_high_priority_stream": True}
    path.write_text("dp: {max_ctas: 9}\n")
    assert group_options(str(path)) == GroupOptions()


@pytest.mark.parametrize("text", ["pp: 4", "[1, 2]", "pp: ["])
def test_settings_that_are_none_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    with pytest.raises(
        UsageError, match=r"--nccl-communicator-config-path .*nccl.yaml (is no|can)"
    ):
        group_options(str(path))
    with pytest.raises(UsageError, match="cannot be read"):
        group_options(str(tmp_path / "none.yaml"))
