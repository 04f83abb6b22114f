"""What takes the place of torch.cuda and of NCCL in a rank's process, and notes what they do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_zb.runtime import activation_memory, channels, executor
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.post_validation import StateExchange
from sanitizer.order import BETWEEN, COMPUTE, Bytes, Order

_YES = 0.5
"""The share of questions whether something has ended that are answered with yes."""

_VIEWS = {"detach", "alias", "set_", "lift_fresh", "_unsafe_view", "is_same_size"}
_FACTORIES = ("new_", "empty", "zeros", "ones", "full", "rand")
_WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"}
"""Operations that give the host something to read."""


class Device:
    """The fake device of a process: its order, its rng, its communicators."""

    def __init__(self, rank: int) -> None:
        self.order = Order()
        self.rng = random.Random(f"rank {rank}")
        self._communicators: dict[int, int] = {}
        self._collectives: dict[int, int] = {}
        self._on_host: dict[int, StorageWeakRef] = {}

    # --- memory

    def keep_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take a tensor for one of the host, which no kernel uses."""
        data = tensor.untyped_storage()
        self._on_host[data._cdata] = StorageWeakRef(data)
        return tensor

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        known = self._on_host.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def bytes_of(self, tensor: torch.Tensor) -> Bytes | None:
        """Return the bytes of a tensor, from its first to its last; None where it has none."""
        try:
            data = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None
        key = data._cdata
        if not self.order.knows(key):
            self.order.hand_out(key, data.nbytes(), StorageWeakRef(data).expired)
        if not tensor.numel():
            return None
        size = tensor.element_size()
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * size
        return Bytes(key, start, start + int(last + 1) * size)

    def all_bytes(self, tensors: list[torch.Tensor]) -> list[Bytes]:
        return [found for t in tensors if (found := self.bytes_of(t)) is not None]

    # --- NCCL

    def kernel_of(self, group: object, reads: list[Any], writes: list[Any], what: str) -> Any:
        """Enqueue a kernel on the stream of a communicator; return its state and its stream."""
        stream = self._communicators.get(id(group))
        if stream is None:
            stream = self._communicators[id(group)] = self.order.new_stream(f"NCCL: {what}")
        self.order.wait(stream, self.order.state(self.order.current))
        self.order.launch(stream, self.all_bytes(reads), self.all_bytes(writes), what)
        return self.order.state(stream), stream

    def collective(self, reads: list[torch.Tensor], writes: list[torch.Tensor], what: str) -> None:
        """Enqueue a collective of Megatron's: all on one stream, and torch keeps their memory."""
        self._collectives, stream = self.kernel_of(self._collectives_name, reads, writes, what)
        for tensor in (*reads, *writes):
            self.record(tensor, stream)

    _collectives_name = "collectives"

    def wait_for_collectives(self) -> None:
        self.order.wait(self.order.current, self._collectives)

    def record(self, tensor: torch.Tensor, stream: int) -> None:
        where = self.bytes_of(tensor)
        if where is not None:
            self.order.record(where.key, stream)


DEVICE = Device(0)
"""The device of this process; :func:`install` makes another one."""


class Stream:
    """A fake stream, with the methods of torch.cuda.Stream that are used."""

    def __init__(
        self, device: Any = None, priority: int = 0, number: int | None = None, name: str = "stream"
    ) -> None:
        self.number = DEVICE.order.new_stream(name) if number is None else number
        self.cuda_stream = self.stream_id = self.number
        self.device = device

    def wait_stream(self, other: Stream) -> None:
        DEVICE.order.wait(self.number, DEVICE.order.state(other.number))

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        DEVICE.order.host_wait(DEVICE.order.state(self.number), "Stream.synchronize")

    def query(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


class Event:
    """A fake event, with the methods of torch.cuda.Event that are used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._state: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        order = DEVICE.order
        self._state = order.state(order.current if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        order = DEVICE.order
        order.wait(order.current if stream is None else stream.number, self._state)

    def query(self) -> bool:
        if DEVICE.rng.random() >= _YES:
            return False
        DEVICE.order.learn(self._state)
        return True

    def synchronize(self) -> None:
        DEVICE.order.host_wait(self._state, "Event.synchronize")

    def elapsed_time(self, _later: Event) -> float:
        return 0.0


class Message:
    """The kernel of a message; ``real`` moves its bytes."""

    def __init__(self, group: object, tensor: torch.Tensor, sends: bool, real: dist.Work) -> None:
        reads, writes = ([tensor], []) if sends else ([], [tensor])
        what = "send" if sends else "receive"
        self._state, _ = DEVICE.kernel_of(group, reads, writes, what)
        self._real: dist.Work | None = real

    def move(self) -> None:
        """Have the bytes arrive, while no stream waits for them."""
        if self._real is not None:
            self._real.wait()
            self._real = None

    def wait(self) -> None:
        self.move()
        DEVICE.order.wait(DEVICE.order.current, self._state)

    def is_completed(self) -> bool:
        if DEVICE.rng.random() >= _YES:
            return False
        self.move()
        DEVICE.order.learn(self._state)
        return True


def install(rank: int) -> None:
    """Take the place of torch.cuda in this process, before channels are made in it."""
    global DEVICE
    DEVICE = Device(rank)
    _take_the_place_of_cuda()
    _run_channels_as_on_a_gpu()
    _keep_on_host()
    _label_passes()
    engines: Any = activation_memory
    engines.engines_of = activation_memory.StreamEngines


def _take_the_place_of_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream, cuda.Event, cuda.stream = Stream, Event, _on_stream
    cuda.current_stream = lambda device=None: Stream(number=DEVICE.order.current)
    cuda.default_stream = lambda device=None: Stream(number=COMPUTE)
    cuda.synchronize = lambda device=None: DEVICE.order.wait_for_all("synchronize")
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda tensor, stream: DEVICE.record(tensor, stream.number)
    work: Any = dist.Work
    usual_wait = work.wait

    def wait(self: dist.Work, *arguments: Any) -> Any:
        DEVICE.wait_for_collectives()
        return usual_wait(self, *arguments)

    work.wait = wait


@contextmanager
def _on_stream(stream: Stream | None) -> Iterator[None]:
    with DEVICE.order.on(DEVICE.order.current if stream is None else stream.number):
        yield


def _run_channels_as_on_a_gpu() -> None:
    channels: Any = Channels
    prepare, isend, irecv = channels._prepare, channels._isend, channels._irecv

    def on_gpu(self: Any, device: torch.device) -> None:
        prepare(self, device)
        self._receiving = Stream(name="receives")

    def send(self: Any, channel: Any, tensor: torch.Tensor) -> Any:
        if DEVICE.is_on_host(tensor):
            with DEVICE.order.quiet():
                return isend(self, channel, tensor)
        with DEVICE.order.quiet():  # gloo's own memory: a fake kernel has the tensor for as long
            real = isend(self, channel, tensor.detach().clone())
        return Message(self._groups[channel][0], tensor, True, real)

    def receive(self: Any, channel: Any, buffer: torch.Tensor) -> Any:
        with DEVICE.order.quiet():
            real = irecv(self, channel, buffer)
            if DEVICE.is_on_host(buffer):
                return real
        return Message(self._groups[channel][0], buffer, False, real)

    channels._prepare, channels._isend, channels._irecv = on_gpu, send, receive


def _keep_on_host() -> None:
    """Keep what travels from host to host apart: headers, and states of post-validation."""
    headers: Any = channels
    empty_header = headers._empty_header
    headers._empty_header = lambda: DEVICE.keep_on_host(empty_header())
    exchange: Any = StateExchange
    empty_state, partial = exchange._empty, exchange.partial
    exchange._empty = lambda self: DEVICE.keep_on_host(empty_state(self))
    exchange.partial = lambda self, own: partial(self, DEVICE.keep_on_host(own))


def _label_passes() -> None:
    execution: Any = executor.Execution

    def labelled(usual: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def run(self: Any, instruction: Any) -> None:
            order = DEVICE.order
            begin = self._begin

            def begun(launches_little: bool) -> None:
                begin(launches_little)
                order.label = str(instruction.work)

            self._begin = begun
            try:
                usual(self, instruction)
            finally:
                order.label = BETWEEN
                del self._begin

        return run

    execution._run_pass = labelled(execution._run_pass)
    execution._run_pair = labelled(execution._run_pair)


class _Operator(NamedTuple):
    """What is known of an operator of torch by its schema."""

    name: str
    arguments: tuple[tuple[str, bool], ...]  # with whether it is written
    is_view: bool
    makes_unwritten: bool
    is_collective: bool


@cache
def _operator(function: Any) -> _Operator:
    schema = function._schema
    name = schema.name.rpartition("::")[2]
    arguments = tuple(
        (a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments
    )
    return _Operator(
        name,
        arguments,
        name in _VIEWS or function.is_view,
        name.startswith("empty") or name == "new_empty",
        schema.name.startswith("c10d::"),
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if value is None or isinstance(value, (int, float, bool, str)):
        return []
    return [leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class Noting(TorchDispatchMode):
    """The mode in which every operation is a kernel on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if DEVICE.order.is_quiet:
            return func(*args, **kwargs)
        operator = _operator(func)
        if operator.is_collective:
            result = func(*args, **kwargs)
            # their schemas do not say what is written; all but inputs may be
            places = list(zip(operator.arguments, args, strict=False))
            reads, writes = (
                _tensors([given for (name, _), given in places if name.startswith("input") is only])
                for only in (True, False)
            )
            if not any(map(DEVICE.is_on_host, (*reads, *writes))):
                DEVICE.collective(reads, writes, operator.name)
            return result
        result = func(*args, **kwargs)
        if not operator.is_view:
            _note(operator, args, kwargs, result)
        return result


def _note(operator: _Operator, args: Any, kwargs: Any, result: Any) -> None:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    only_the_shape = operator.name.startswith(_FACTORIES) or operator.name.endswith("_like")
    for position, (name, is_written) in enumerate(operator.arguments):
        value = args[position] if position < len(args) else kwargs.get(name)
        if is_written:
            writes += _tensors(value)
        elif not only_the_shape:
            reads += _tensors(value)
    made = _tensors(result)
    if any(map(DEVICE.is_on_host, (*reads, *writes))):
        for tensor in made:
            DEVICE.keep_on_host(tensor)
        return
    if operator.makes_unwritten:
        DEVICE.all_bytes(made)  # which hands their memory out
    else:
        writes += [tensor for tensor in made if not any(tensor is other for other in writes)]
    order = DEVICE.order
    if reads or writes:
        order.launch(
            order.current, DEVICE.all_bytes(reads), DEVICE.all_bytes(writes), operator.name
        )
    if operator.name in _WAITS:
        order.host_wait(order.state(order.current), operator.name)


@contextmanager
def noting() -> Iterator[Order]:
    """Note the order of what runs in this context."""
    with DEVICE.order.tracking(), Noting():
        yield DEVICE.order
