"""Values that a forward changes, each recorded with its contents and put back in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch

SMALL = 64 * 1024
"""Bytes up to which the contents of every tensor are recorded, not only those of buffers."""

MOST = 1000
"""Elements up to which the contents of a container are recorded."""

ABSENT = object()
"""The value of a place that has none."""

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class StatePlace:
    """A value that forwards change: an entry of a mapping, such as the ``vars`` of an object.

    ``is_read`` tells whether a forward reads what an earlier one has set; None if that is unknown.
    ``is_of_user`` is false for objects of Megatron and Transformer-Engine, whose large tensors are
    activations. ``holder`` is the object whose entry this is, if its mapping is a view.
    """

    entries: MutableMapping[Any, Any]
    name: Any
    label: str
    is_of_user: bool
    is_buffer: bool = False
    holder: Any = None
    is_changed_in_place: bool = False
    is_read: bool | None = None
    changes: int = 0
    """Number of forwards that were seen to change it; a cache changes once."""

    @property
    def key(self) -> tuple[int, Any]:
        """Which place this is, for as long as its holder lives."""
        return id(self.entries if self.holder is None else self.holder), self.name

    @property
    def value(self) -> Any:
        return self.entries.get(self.name, ABSENT)

    @property
    def is_state(self) -> bool:
        """Whether a forward may depend on what an earlier one has left here."""
        return self.is_changed_in_place or self.is_read is not False

    @property
    def may_be_scratch(self) -> bool:
        """Whether this is a tensor that every forward may set before it reads it."""
        value = self.value
        is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
        is_known = self.is_read is not None or self.is_changed_in_place
        return is_tensor and not is_known and not _dispatches(value)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Find out whether the code inside reads the tensor here before it sets another one."""
        value, reads = self.value, list[None]()
        watched: _Watched = value.as_subclass(_Watched)
        watched.reads = reads
        self.entries[self.name] = watched
        try:
            yield
        finally:
            if self.value is watched:
                self.entries[self.name] = value
                self.is_read = True if reads else None
            else:
                self.is_read = bool(reads)


class Saved:
    """The value of a place at some time.

    Args:
        place: the place, whose value now is recorded.
        copies: whether to copy the contents of a large tensor, as forwards change them.
        keeps: whether to keep a large tensor alive.
    """

    def __init__(self, place: StatePlace, *, copies: bool, keeps: bool) -> None:
        self.place = place
        self._value = _Value(place.value, copies, keeps)

    @property
    def is_large(self) -> bool:
        return self._value.is_large

    @property
    def is_gone(self) -> bool:
        """Whether the value was not kept alive, and no longer exists."""
        return self._value.is_large and self._value.get() is None

    def change(self) -> bool | torch.Tensor:
        """Return whether the place has another value now, or its value other contents.

        Contents on a device are compared there: the result is a flag, which nobody has waited for.
        """
        return self._value.change(self.place.value)

    @property
    def is_same_object(self) -> bool:
        """Whether the place has the same object now, with whatever contents."""
        return self.place.value is self._value.get()

    def put_back(self) -> None:
        """Set the place to the value, with the contents that it had."""
        value = self._value.restored(self.place.is_changed_in_place)
        if value is ABSENT:
            self.place.entries.pop(self.place.name, None)
        else:
            self.place.entries[self.place.name] = value


class _Value:
    """A value, with a copy of its contents if it is a tensor or a container."""

    def __init__(self, value: Any, copies: bool, keeps: bool) -> None:
        self.is_large = _is_large(value)
        self._contents: Any = None
        self._version: int | None = None
        if isinstance(value, torch.Tensor):
            self._version = _version(value)
            if (copies or not self.is_large) and not _is_freed(value):
                self._contents = value.detach().clone()
        elif isinstance(value, list | set | deque) and len(value) <= MOST:
            self._contents = [_Value(element, copies, True) for element in value]
        is_weak = isinstance(value, torch.Tensor) and self.is_large and not keeps
        self.get: Callable[[], Any] = ref(value) if is_weak else partial(_same, value)

    def change(self, now: Any) -> bool | torch.Tensor:
        value = self.get()
        if now is not value:
            return not (_is_plain(now) and type(now) is type(value) and now == value)
        if isinstance(value, torch.Tensor):
            if _version(value) != self._version:
                return True
            if self._contents is None or _is_freed(value):
                return False
            # what is written through ``data`` leaves the version as it is
            return (value.detach() != self._contents).any()
        if self._contents is None:
            return False
        if len(value) != len(self._contents):
            return True
        pairs = zip(self._contents, value, strict=True)
        return any_of([saved.change(element) for saved, element in pairs])

    def restored(self, in_place: bool) -> Any:
        """Return the value, after its contents have been put back if they change in place."""
        value = self.get()
        if not in_place or self._contents is None:
            return value
        if isinstance(value, torch.Tensor):
            if not _is_freed(value):
                with torch.no_grad():
                    value.copy_(self._contents)
            return value
        elements = [saved.restored(in_place) for saved in self._contents]
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(elements)
        return value


def any_of(changes: Sequence[bool | torch.Tensor]) -> bool | torch.Tensor:
    """Return whether there is any change, as a flag on a device if only that knows."""
    flags = [change for change in changes if isinstance(change, torch.Tensor)]
    if True in [change for change in changes if isinstance(change, bool)]:
        return True
    return torch.stack(on_one_device(flags)).any() if flags else False


def on_one_device(flags: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flags on the device of one of them, not on the host if any is on another device."""
    device = max((flag.device for flag in flags), key=lambda device: device.type != "cpu")
    return [flag.to(device, non_blocking=True) for flag in flags]


class _Watched(torch.Tensor):
    """A tensor that notices functions of torch that read it."""

    reads: list[None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            named = {name: _unwatched(value) for name, value in (kwargs or {}).items()}
            return func(*map(_unwatched, args), **named)


def _unwatched(value: Any) -> Any:
    if type(value) in (list, tuple):
        return type(value)(map(_unwatched, value))
    if not isinstance(value, _Watched):
        return value
    value.reads.append(None)
    return value.as_subclass(torch.Tensor)


def _same(value: Any) -> Any:
    return value


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _dispatches(tensor: torch.Tensor) -> bool:
    """Return whether a class runs operations in Python, so that no other class can take its place.

    Quantized tensors of Transformer-Engine and DTensor are such.
    """
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the data is freed, as Megatron frees activations that it no longer needs."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _is_large(value: Any) -> bool:
    """Return whether a value keeps more than a little memory alive."""
    if isinstance(value, torch.Tensor):
        return value.nbytes > SMALL or value.requires_grad
    return isinstance(value, tuple | list | set | deque) and any(map(_is_large, value))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
