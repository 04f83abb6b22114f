"""Counter of the bytes of live activations on one rank.

What autograd saves for backward is counted once per storage, without parameters; receive buffers,
messages on their way out and what deferred weight gradients hold are added by those who hold them.
Works the same for any backend and for Megatron's own schedules, so that two schedules can be
compared by one measure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


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
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
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


def _unpack(saved: _CountedTensor) -> torch.Tensor:
    return saved.tensor
