"""Messages between pipeline ranks: one first-in-first-out queue for each direction of a link.

Each direction of a link has a process group of its own, and so, with NCCL, a communicator and a
stream in which nothing else can stand in front of a message. On a GPU nothing here blocks the host:
receives are enqueued from a separate stream, ``take`` makes the current stream wait, and
finished sends are found by asking. Only how far the host runs ahead is bounded, which bounds what
messages hold.

A receive that waits for its message is a kernel that occupies thread blocks beside the computation.
So it begins no earlier than the pass behind which it stands in the program, although the host has
enqueued it up to three passes before.

Nothing can be asked while a CUDA graph is captured. Then the stream waits for a send when its slot
is needed, and receives are enqueued behind the computation, whose memory they may take over.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.schedules.passes import Channel, Message
from megatron_zb.schedules.placement import Placement
from megatron_zb.schedules.waiting_kernels import RUN_AHEAD

# --- process groups, of which every rank of the job names its own


@dataclass(frozen=True)
class GroupOptions:
    """Options of process groups; the defaults suit messages between pipeline ranks.

    ``nccl`` has attributes of ``ProcessGroupNCCL.Options`` and of its ``config`` by their names. A
    receive that waits for its message occupies its thread blocks, which then compute nothing, so
    few are requested; their kernels start ahead of others. Other backends ignore ``nccl``.
    """

    nccl: Mapping[str, Any] = field(
        default_factory=lambda: {"max_ctas": 2, "is_high_priority_stream": True}
    )

    def with_one_block(self) -> GroupOptions:
        """Return these options, with kernels of one thread block: a rank may have many links."""
        others = {name: value for name, value in self.nccl.items() if name != "min_ctas"}
        return replace(self, nccl={**others, "max_ctas": 1})

    def for_backend(self, backend: str) -> Any:
        """Return the ``pg_options`` for ``dist.new_group``.

        Raises:
            UsageError: this torch's NCCL has no option of one of the names.
        """
        if "nccl" not in backend:
            return None
        options: Any = dist.ProcessGroupNCCL.Options()
        for name, value in self.nccl.items():
            owner = options if hasattr(options, name) else options.config
            if not hasattr(owner, name):
                raise UsageError(
                    f"NCCL's process groups have no option '{name}' in torch {torch.__version__}: "
                    "take it out of pp in the file of --nccl-communicator-config-path"
                )
            setattr(owner, name, value)
        return options


def new_groups(
    mine: Sequence[Sequence[int]],
    backend: str | None = None,
    options: GroupOptions | None = None,
) -> list[dist.ProcessGroup]:
    """Make a group for each of the rank lists that this rank names, and belongs to.

    Collective over all ranks of the job: each makes the groups of all, in one order. Ranks that
    name the same list share its group; the same ranks in another order have another one. The groups
    have the timeout of the job.
    """
    options = options or GroupOptions(nccl={})
    wanted = [tuple(members) for members in mine]
    everyone: list[list[tuple[int, ...]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, wanted)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for members in sorted({m for named in everyone for m in named}):
        group = dist.new_group(
            list(members),
            timeout=_timeout_of_job(),
            backend=backend,
            pg_options=options.for_backend(backend or dist.get_backend()),
        )
        if isinstance(group, dist.ProcessGroup):  # ranks outside get a number instead
            groups[members] = group
    return [groups[members] for members in wanted]


def _timeout_of_job() -> timedelta | None:
    """Return the timeout given to ``init_process_group``, None for torch's default."""
    world: Any = dist.group.WORLD
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        timeout: timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


# --- queues


def _unobserved(_: Channel) -> AbstractContextManager[Any]:
    return nullcontext()


class Header(NamedTuple):
    """Header that goes ahead of a message whose shape its reader does not know."""

    message: Message


def channels_of(placement: Placement, more_peers: Iterable[tuple[int, int]] = ()) -> list[Channel]:
    """List every channel that a placement needs, in the one order that all ranks agree on.

    ``more_peers`` are pairs of ranks beside those of the placement.
    """
    pairs = {*placement.peers, *more_peers}
    return sorted({c for a, b in pairs for c in (Channel(a, b), Channel(b, a))})


class Channels:
    """The channels of one rank over ``pipeline_ranks`` (global ranks in logical order).

    Creating it is collective over all ranks of the job: every channel gets a group of its two
    ranks, and one element is sent over it, because a backend such as NCCL connects a pair at its
    first message and would hold up the host in the middle of a step.

    Args:
        more_peers: pairs of ranks that messages travel between beside those of the placement.
        backend: of the groups; None for that of the job.
        options: how the groups are made; those of ``more_peers`` with one thread block each.
    """

    waits_to_receive = False

    def __init__(
        self,
        pipeline_ranks: Sequence[int],
        placement: Placement,
        device: torch.device | str | int,
        *,
        more_peers: Iterable[tuple[int, int]] = (),
        backend: str | None = None,
        options: GroupOptions | None = None,
    ) -> None:
        self._ranks = list(pipeline_ranks)
        me = self._ranks.index(dist.get_rank())
        options = options or GroupOptions()
        usual = channels_of(placement)
        more = [c for c in channels_of(placement, more_peers) if c not in usual]
        self._groups: dict[Channel, tuple[dist.ProcessGroup, int]] = {}
        for channels, how in ((usual, options), (more, options.with_one_block())):
            self._link([channel for channel in channels if me in channel], backend, how)
        self._prepare(torch.empty(0, device=device).device)
        self._connect(sorted(self._groups), me, device)

    def _link(
        self, channels: Sequence[Channel], backend: str | None, options: GroupOptions
    ) -> None:
        pairs = [(self._ranks[a], self._ranks[b]) for a, b in channels]
        rank = dist.get_rank()  # in a group of two, the peer is the first or the second
        for channel, pair, group in zip(
            channels, pairs, new_groups(pairs, backend, options), strict=True
        ):
            self._groups[channel] = group, int(max(pair) != rank)

    def _prepare(self, device: torch.device) -> None:
        """Initialise the state, with no message under way."""
        self.activation_memory: ActivationMemory | None = None
        self.until_taken: Callable[[Channel], AbstractContextManager[Any]] = _unobserved
        """Context to wait in until the reader of a channel has taken a message."""
        self._received: dict[Message | Header, tuple[dist.Work, torch.Tensor]] = {}
        self._sends: dict[Channel, deque[tuple[dist.Work, torch.Tensor]]] = defaultdict(deque)
        on_gpu = device.type == "cuda"
        self._receiving: Any = torch.cuda.Stream(device) if on_gpu else None
        self._enqueued: deque[torch.cuda.Event] = deque()
        self._captures = False

    def _connect(
        self, channels: Iterable[Channel], me: int, device: torch.device | str | int
    ) -> None:
        probe = torch.zeros(1, device=device)
        for channel in channels:
            start = self._isend if channel.source == me else self._irecv
            start(channel, probe).wait()

    # Straight to the group: what dist.isend does besides takes the host longer than the call.

    def _isend(self, channel: Channel, tensor: torch.Tensor) -> dist.Work:
        group, peer = self._groups[channel]
        return group.send([tensor], peer, 0)

    def _irecv(self, channel: Channel, buffer: torch.Tensor) -> dist.Work:
        group, peer = self._groups[channel]
        return group.recv([buffer], peer, 0)

    @contextmanager
    def capturing(self, captures: bool) -> Iterator[bool]:
        """Ask nothing of the device in this context if the messages go into a CUDA graph."""
        receiving = self._receiving
        self._captures = captures
        if captures:
            self._receiving = None
        try:
            yield captures
        finally:
            self._captures, self._receiving = False, receiving

    def _apart(self) -> AbstractContextManager[Any]:
        """Return a context that enqueues on the stream of the receives."""
        return nullcontext() if self._receiving is None else torch.cuda.stream(self._receiving)

    def post_receive(
        self, channel: Channel, message: Message | Header, allocate: Callable[[], torch.Tensor]
    ) -> None:
        """Receive the channel's next message into a new buffer; :meth:`take` hands it out."""
        if self._receiving is not None and self._enqueued:
            self._receiving.wait_event(self._enqueued[-1])
        with self._apart():  # a buffer from elsewhere could still be in use by the computation
            buffer = allocate()
            work = self._irecv(channel, buffer)
        if self.activation_memory is not None:
            self.activation_memory.hold(buffer)
        self._received[message] = (work, buffer)

    def take(self, message: Message | Header) -> torch.Tensor:
        """Wait for a posted message and give its buffer away."""
        work, buffer = self._received.pop(message)
        work.wait()
        if self._receiving is not None:  # freed only when the computation has used it
            buffer.record_stream(torch.cuda.current_stream())
        if self.activation_memory is not None:
            self.activation_memory.release(buffer)
        return buffer

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        """Send a tensor as the channel's next message, and keep it until it has been taken.

        At most ``slots`` sends of a channel are left untaken: past that, the oldest is waited for.
        """
        pending = self._sends[channel]
        if len(pending) >= slots:
            self._wait_until_taken(channel, slots - 1)
        tensor = tensor.contiguous()
        if self.activation_memory is not None:
            self.activation_memory.hold_sent(tensor)
        pending.append((self._isend(channel, tensor), tensor))

    def between_passes(self, launches_little: bool = False) -> None:
        """Release the sends that have been taken, and keep the host from running too far ahead.

        Args:
            launches_little: the next pass is of a kind that keeps a GPU busy for microseconds.
        """
        if self._captures:
            return
        if self._receiving is not None and not launches_little:
            self._hold_back()
        for pending in self._sends.values():
            while pending and pending[0][0].is_completed():
                self._forget(pending)

    def _hold_back(self) -> None:
        """Wait for an earlier pass: it needs nothing that comes after it in the program."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._enqueued.append(event)
        if len(self._enqueued) > RUN_AHEAD:
            self._enqueued.popleft().synchronize()

    def _wait_until_taken(self, channel: Channel, left: int) -> None:
        """Wait for the oldest sends of a channel until only ``left`` are untaken."""
        pending = self._sends[channel]
        with nullcontext() if self._captures else self.until_taken(channel):
            while len(pending) > left:
                pending[0][0].wait()
                self._forget(pending)

    def _forget(self, pending: deque[tuple[dist.Work, torch.Tensor]]) -> None:
        _, tensor = pending.popleft()
        if self.activation_memory is not None:
            self.activation_memory.release_sent(tensor)

    def close(self) -> None:
        """Destroy the groups; collective over the pipeline."""
        for group, _ in self._groups.values():
            dist.destroy_process_group(group)

    def finish(self) -> None:
        """Wait for every send of this step; a step leaves no message behind."""
        for channel, pending in self._sends.items():
            if pending:
                self._wait_until_taken(channel, 0)
        self._enqueued.clear()
        if self._received:
            raise RuntimeError(f"messages were received and never read: {list(self._received)}")


# A header is the number of dimensions and then their sizes, padded to this length.
_HEADER_LENGTH = 8


class ShapedChannels:
    """Channels on which every message may have another shape; used in place of Channels.

    A header goes from host to host when the pass that makes the message has been enqueued, so
    reading it waits for no GPU. The reader's host waits for it where the receive stands in the
    program, which every program allows. A gradient that comes back from the rank to which its
    activation went has the activation's shape, and no header.

    Args:
        channels: for the messages.
        headers: between the same ranks, for tensors of the host.
        num_stages: stages of the model; what others send back has another shape than they get.
    """

    waits_to_receive = True

    def __init__(self, channels: Channels, headers: Channels, num_stages: int) -> None:
        self._channels, self._headers = channels, headers
        headers.until_taken = self._until_taken
        self._num_stages = num_stages
        self._of_activations: dict[tuple[Channel, int, int], list[int]] = {}

    def post_receive(
        self, channel: Channel, message: Message, allocate: Callable[[], torch.Tensor]
    ) -> None:
        """Receive a message of any shape, with the type and the device of ``allocate()``."""
        shape = self._known(channel, message)
        if shape is None:
            header = Header(message)
            self._headers.post_receive(channel, header, _empty_header)
            dimensions, *sizes = self._headers.take(header).tolist()
            shape = sizes[:dimensions]
            self._remember(channel, message, shape)
        self._channels.post_receive(channel, message, lambda: allocate().new_empty(shape))

    def take(self, message: Message) -> torch.Tensor:
        """Wait for a posted message and give its buffer away."""
        return self._channels.take(message)

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        """Send a tensor as the channel's next message, its shape first unless that is known."""
        known, shape = self._known(channel, message), list(tensor.shape)
        if known is None:
            header = _empty_header().zero_()
            header[: tensor.dim() + 1] = torch.tensor([tensor.dim(), *shape], device="cpu")
            self._headers.send(channel, header, slots)
            self._remember(channel, message, shape)
        elif known != shape:
            raise RuntimeError(f"{message} has the shape {shape}, but its activation {known}")
        self._channels.send(channel, tensor, slots)

    def _until_taken(self, channel: Channel) -> AbstractContextManager[Any]:
        """Return the context of the messages' channels, which may have been set after this."""
        return self._channels.until_taken(channel)

    def _remember(self, channel: Channel, message: Message | None, shape: list[int]) -> None:
        """Remember the shape of an activation on both its ranks, for the gradient that returns."""
        if self._is_of_model(message) and not message.is_gradient:
            back = Channel(channel.target, channel.source)
            self._of_activations[back, message.stage - 1, message.microbatch] = shape

    def _known(self, channel: Channel, message: Message | None) -> list[int] | None:
        if not self._is_of_model(message) or not message.is_gradient:
            return None
        return self._of_activations.pop((channel, message.stage, message.microbatch), None)

    def _is_of_model(self, message: Message | None) -> TypeGuard[Message]:
        return is_between_stages(message, self._num_stages)

    def between_passes(self, launches_little: bool = False) -> None:
        """Release the sends that have been taken, and keep the host from running too far ahead."""
        self._headers.between_passes(launches_little)
        self._channels.between_passes(launches_little)

    def finish(self) -> None:
        """Wait for every send of this step."""
        self._headers.finish()
        self._channels.finish()
        self._of_activations.clear()  # of forwards alone, nothing returns


def is_between_stages(message: Message | None, num_stages: int) -> TypeGuard[Message]:
    """Return whether a message is an activation or its gradient between two stages of a model."""
    return message is not None and message.stage < num_stages and message.made_by is None


class KnownShapes:
    """Channels of a step whose shapes all ranks know; used in place of Channels.

    Args:
        channels: for the messages.
        shape_of: shape of a message between stages.
        num_stages: stages of the model; messages to others have shapes that follow from these.
    """

    waits_to_receive = False

    def __init__(
        self, channels: Channels, shape_of: Callable[[Message], tuple[int, ...]], num_stages: int
    ) -> None:
        self._channels, self._shape_of, self._num_stages = channels, shape_of, num_stages
        self.post_receive, self.take = channels.post_receive, channels.take
        self.between_passes, self.finish = channels.between_passes, channels.finish

    def send(
        self, channel: Channel, tensor: torch.Tensor, slots: int, message: Message | None = None
    ) -> None:
        """Send a tensor as the channel's next message.

        Raises:
            UsageError: it has another shape than the one that its reader knows.
        """
        if is_between_stages(message, self._num_stages):
            known = self._shape_of(message)
            if tensor.shape != known:
                raise UsageError(
                    f"an activation of microbatch {message.microbatch} has the shape "
                    f"{list(tensor.shape)}, but {list(known)} follows from the shapes that the "
                    "step was planned with: give the sequence length and the batch size that the "
                    "model computes with"
                )
        self._channels.send(channel, tensor, slots, message)


def _empty_header() -> torch.Tensor:
    return torch.empty(_HEADER_LENGTH, dtype=torch.int64, device="cpu")
