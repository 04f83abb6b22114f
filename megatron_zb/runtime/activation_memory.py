"""Activations on one rank: the bytes that are live, and their offload to the host.

What autograd saves for backward is counted once per storage, without parameters; receive buffers,
messages on their way out and what deferred weight gradients hold are added by those who hold them.
Works the same for any backend and for Megatron's own schedules, so that two schedules can be
compared by one measure.

Tensors that autograd saves in the forward of an offloaded microbatch are kept by storage, so that
views and tensors that several operations save are copied once, after the forward; they are loaded
again before the backward. Parameters and buffers of the model stay on the device, and so do
storages that are small beside the rest, and those that the forward empties to compute them again. A
storage is never emptied, only released: others that hold it, such as a message on its way out, keep
it. A backward reads the reloaded storage instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class ActivationMemory:
    """A counter of live activation bytes; ``peak_bytes`` is the most there ever were."""

    def __init__(self, exclude: Iterable[torch.Tensor] = ()) -> None:
        self._excluded = {_key(t) for t in exclude}
        self._holders: dict[int, int] = {}
        self._sent: Counter[int] = Counter()
        self._nbytes: dict[int, int] = {}
        self.live_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def watching(self) -> Iterator[ActivationMemory]:
        """Count what autograd saves while this context is active."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack_counted):
            yield self

    def _pack(self, tensor: torch.Tensor) -> _CountedTensor:
        return _CountedTensor(tensor, self)

    def hold(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage, unless it is counted already."""
        key = _key(tensor)
        if key in self._excluded:
            return
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self._nbytes[key] = tensor.untyped_storage().nbytes()
            self.live_bytes += self._nbytes[key]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def release(self, tensor: torch.Tensor) -> None:
        """Undo one :meth:`hold`."""
        self.release_storage(_key(tensor))

    def hold_sent(self, tensor: torch.Tensor) -> None:
        """Count a message's storage until :meth:`release_sent`."""
        self.hold(tensor)
        self._sent[_key(tensor)] += 1

    def release_sent(self, tensor: torch.Tensor) -> None:
        """Undo one :meth:`hold_sent`."""
        self._sent -= Counter([_key(tensor)])
        self.release(tensor)

    @property
    def bytes_of_passes(self) -> int:
        """Live bytes without those of messages that are held for nothing but their sending.

        When these are let go is chance: gloo says that a message has been taken only if waited for.
        """
        messages = (key for key, sent in self._sent.items() if self._holders.get(key) == sent)
        return self.live_bytes - sum(self._nbytes[key] for key in messages)

    def release_storage(self, key: int) -> None:
        """Undo one :meth:`hold` of a tensor that had this storage then."""
        holders = self._holders.get(key)
        if holders is None:
            return
        if holders > 1:
            self._holders[key] = holders - 1
        else:
            del self._holders[key]
            self.live_bytes -= self._nbytes.pop(key)


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _CountedTensor:
    """Substitute that autograd keeps for a saved tensor; counted for as long as it lives.

    It may have another storage by then: Transformer-Engine empties tensors that it has used.
    """

    __slots__ = ("key", "memory", "tensor")

    def __init__(self, tensor: torch.Tensor, memory: ActivationMemory) -> None:
        self.tensor, self.memory, self.key = tensor, memory, _key(tensor)
        memory.hold(tensor)

    def __del__(self) -> None:
        self.memory.release_storage(self.key)


def _unpack_counted(saved: _CountedTensor) -> torch.Tensor:
    return saved.tensor


# --- offload


SMALL = 256
"""What is smaller than the largest storage of a unit by this factor stays on the device."""

_ALIGNED = 512
"""Bytes to which a storage is aligned in the host's memory."""


class HostMemory:
    """Host memory of one rank, in pieces that are used again and again.

    What is taken may lie in parts of several pieces, so that units of other lengths fit into what
    is there already. ``taken_bytes`` is what the pieces take, which is the most that was ever in
    use at a time, rounded up to a whole piece.
    """

    def __init__(self, device: torch.device, engines: HostCopyEngines | None = None) -> None:
        self.device = device
        self.engines = engines or engines_of(device)
        self._pieces: list[torch.Tensor] = []
        self._free: list[Segment] = []
        self.taken_bytes = 0

    def take(self, nbytes: int) -> list[Segment]:
        """Return memory of the given number of bytes, in parts, until :meth:`give_back`."""
        parts: list[Segment] = []
        while nbytes:
            piece, start, end = self._free.pop() if self._free else self._new_piece(nbytes)
            cut = min(end, start + nbytes)
            if cut < end:
                self._free.append(Segment(piece, cut, end))
            parts.append(Segment(piece, start, cut))
            nbytes -= cut - start
        return parts

    @property
    def used_bytes(self) -> int:
        """Bytes of what is in use now."""
        return self.taken_bytes - sum(end - start for _, start, end in self._free)

    def bytes_of(self, part: Segment) -> torch.Tensor:
        """Return the memory of a part."""
        return self._pieces[part.piece][part.start : part.end]

    def give_back(self, parts: Iterable[Segment]) -> None:
        """Take memory back; what has been copied from it is read no more."""
        self._free = list(_joined(sorted([*self._free, *parts])))

    def _new_piece(self, nbytes: int) -> Segment:
        piece = self.engines.host_buffer(self.engines.piece or nbytes)
        self._pieces.append(piece)
        self.taken_bytes += piece.nbytes
        return Segment(len(self._pieces) - 1, 0, piece.nbytes)


class Segment(NamedTuple):
    """Bytes of a piece, from ``start`` to ``end``."""

    piece: int
    start: int
    end: int


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Join segments, in their order, that touch each other."""
    last: Segment | None = None
    for segment in segments:
        if last is not None and last[::2] == segment[:2]:
            last = last._replace(end=segment.end)
            continue
        if last is not None:
            yield last
        last = segment
    if last is not None:
        yield last


class _Storage:
    """A storage that autograd has saved, on the device or not; counted while it is."""

    __slots__ = ("data", "memory", "nbytes")

    def __init__(self, data: torch.UntypedStorage, memory: ActivationMemory | None) -> None:
        self.data: torch.UntypedStorage | None = None
        self.nbytes, self.memory = data.nbytes(), memory
        self.put(data)

    def put(self, data: torch.UntypedStorage) -> None:
        self.data = data
        if self.memory is not None:
            self.memory.hold(_bytes_of(data))

    @property
    def is_whole(self) -> bool:
        """Whether nobody has resized it since it was saved."""
        return self.data is not None and self.data.nbytes() == self.nbytes

    def let_go(self) -> None:
        if self.memory is not None and self.data is not None:
            self.memory.release_storage(self.data._cdata)
        self.data = None

    def __del__(self) -> None:
        self.let_go()


class _OffloadedTensor:
    """Substitute that autograd keeps for a saved tensor: a view of a storage."""

    __slots__ = ("dtype", "offset", "size", "storage", "stride")

    def __init__(self, tensor: torch.Tensor, storage: _Storage) -> None:
        self.storage, self.dtype = storage, tensor.dtype
        self.offset, self.size, self.stride = (
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )

    def tensor(self) -> torch.Tensor:
        data = self.storage.data
        assert data is not None, "a backward has begun before its activations were back"
        empty = torch.empty(0, dtype=self.dtype, device=data.device)
        return empty.set_(data, self.offset, self.size, self.stride)


class _Unit:
    """One microbatch of a stage, from its forward until its backward begins."""

    def __init__(self) -> None:
        self.storages: dict[int, _Storage] = {}
        self.offloaded: list[tuple[_Storage, list[Segment]]] = []  # and where on the host
        self.wait: Wait | None = None

    def choose(self, host: HostMemory) -> None:
        """Choose what is offloaded, and take memory of the host for it.

        A storage that the forward has emptied since stays: recomputation will refill it, and a
        backward is to read that.
        """
        whole = [storage for storage in self.storages.values() if storage.is_whole]
        largest = max((storage.nbytes for storage in whole), default=0)
        self.storages.clear()
        for storage in whole:
            if storage.nbytes * SMALL >= largest and storage.nbytes:
                self.offloaded.append((storage, host.take(_aligned(storage.nbytes))))

    def copies(self, host: HostMemory, *, to_host: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pairs of bytes to copy in one direction."""
        found = []
        for storage, parts in self.offloaded:
            assert storage.data is not None
            here = _bytes_of(storage.data)
            for part in parts:
                there = host.bytes_of(part)[: here.nbytes]
                pair = (there, here[: there.nbytes])
                found.append(pair if to_host else pair[::-1])
                here = here[there.nbytes :]
        return found

    def leave(self, host: HostMemory) -> None:
        """Give the memory of the host back."""
        host.give_back(part for _, parts in self.offloaded for part in parts)
        self.offloaded.clear()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class OffloadedActivations:
    """The activations of one stage that are offloaded.

    Args:
        host: the memory of the host, and the engines that copy; one for all stages of a rank.
        staying: tensors whose storages are never offloaded: parameters and buffers.
        also: addresses of further storages that are not offloaded now; the caller changes it.
    """

    def __init__(
        self,
        host: HostMemory,
        staying: Collection[torch.Tensor] = (),
        also: Collection[int] = (),
    ) -> None:
        self._host, self._also = host, also
        self._staying = {tensor.untyped_storage()._cdata for tensor in staying}
        self._units: dict[int, _Unit] = {}
        self._seen: dict[int, StorageWeakRef] = {}  # of earlier microbatches, by address
        self.activation_memory: ActivationMemory | None = None

    @contextmanager
    def saving(self, microbatch: int) -> Iterator[None]:
        """Keep what autograd saves in a forward, by storage.

        A storage that an earlier microbatch has also saved, such as a table of rotary embeddings,
        stays on the device: its owner keeps it there, so that offload would free nothing.
        """
        unit = _Unit()
        self._seen = {at: seen for at, seen in self._seen.items() if not seen.expired()}

        def pack(tensor: torch.Tensor) -> Any:
            if not _is_plain(tensor) or tensor.device.type != self._host.device.type:
                return tensor.detach()
            data = tensor.untyped_storage()
            if data._cdata in self._staying:
                return tensor
            if data._cdata in self._also:
                return tensor.detach()
            storage = unit.storages.get(data._cdata)
            if storage is None:
                if data._cdata in self._seen:
                    return tensor.detach()
                storage = unit.storages[data._cdata] = _Storage(data, self.activation_memory)
            return _OffloadedTensor(tensor, storage)

        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            yield
        self._units[microbatch] = unit
        for storage in unit.storages.values():
            if storage.data is not None:
                self._seen[storage.data._cdata] = StorageWeakRef(storage.data)

    def begin_copy_out(self, microbatch: int) -> None:
        """Begin to copy what a forward has saved to the host."""
        unit = self._units[microbatch]
        unit.choose(self._host)
        copied = unit.copies(self._host, to_host=True)
        unit.wait = self._host.engines.begin(copied, to_host=True)

    def end_copy_out(self, microbatch: int) -> None:
        """Wait until what is offloaded is on the host, and let its memory on the device go."""
        unit = self._units[microbatch]
        _end(unit)
        for storage, _ in unit.offloaded:
            storage.let_go()

    def begin_copy_in(self, microbatch: int) -> None:
        """Take memory on the device, and begin to copy from the host."""
        unit = self._units[microbatch]
        for storage, _ in unit.offloaded:
            empty = torch.empty(storage.nbytes, dtype=torch.uint8, device=self._host.device)
            storage.put(empty.untyped_storage())
        copied = unit.copies(self._host, to_host=False)
        unit.wait = self._host.engines.begin(copied, to_host=False)

    def end_copy_in(self, microbatch: int) -> None:
        """Wait until what a backward reads is back; from here on autograd alone holds it."""
        unit = self._units.pop(microbatch)
        _end(unit)
        unit.leave(self._host)  # torch keeps the hooks, and so the unit, until the graph has gone

    def reset(self) -> None:
        """Forget all: no backward will come."""
        while self._units:
            _, unit = self._units.popitem()
            _end(unit)
            unit.leave(self._host)


def _end(unit: _Unit) -> None:
    if unit.wait is not None:
        unit.wait()
        unit.wait = None


def _unpack(saved: Any) -> torch.Tensor:
    tensor: torch.Tensor = saved.tensor() if isinstance(saved, _OffloadedTensor) else saved
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a strided view of its storage."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain and tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _bytes_of(data: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(data)


Copied = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of tensors of bytes: where to, and where from."""

Wait = Callable[[], None]
"""Function that makes what is computed from here on wait for a copy."""


class HostCopyEngines(Protocol):
    """The two copy engines of a device; each copies what it is given in turn.

    ``piece`` is the number of bytes in which memory of the host is to be requested, None for any.
    """

    piece: int | None

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        """Begin to copy, behind what the device has been given to compute until now."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory of the host that the engines reach."""


def engines_of(device: torch.device) -> HostCopyEngines:
    """Return the copy engines of a device."""
    return StreamEngines(device) if device.type == "cuda" else ThreadEngines()


class ThreadEngines:
    """Engines of a rank on a CPU: a thread for each direction, between two parts of its memory.

    With ``seconds_per_byte``, a copy takes so long at least.
    """

    piece: int | None = None

    def __init__(self, seconds_per_byte: float = 0.0) -> None:
        self._seconds_per_byte = seconds_per_byte
        self._threads = {to_host: ThreadPoolExecutor(max_workers=1) for to_host in (True, False)}

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        return self._threads[to_host].submit(self._copy, copied).result

    def _copy(self, copied: Copied) -> None:
        for there, here in copied:
            there.copy_(here)
        time.sleep(self._seconds_per_byte * sum(here.nbytes for _, here in copied))

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class StreamEngines:
    """Engines of a GPU: a stream for each direction. The host waits for nothing.

    Pieces are of a power of two, to which torch rounds up any request for pinned memory.
    To pin a GiB takes some tenths of a second, once for each piece.
    """

    piece: int | None = 64 * 2**20

    def __init__(self, device: torch.device) -> None:
        self._streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)}

    def begin(self, copied: Copied, *, to_host: bool) -> Wait:
        stream, ended = self._streams[to_host], torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for there, here in copied:
                there.copy_(here, non_blocking=True)
            ended.record()

        def wait() -> None:
            torch.cuda.current_stream().wait_event(ended)

        return wait

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
