"""Deferred weight gradients: made in B, carried out in W, in the microbatch order of B."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from megatron_zb.errors import UsageError
from megatron_zb.runtime.activation_memory import ActivationMemory


class WeightGradTask(NamedTuple):
    """Weight gradients left to do in one go, and the tensors they keep alive until then.

    ``prepare`` begins to communicate what they need, beside the task before. ``versions`` are those
    of the operands in B, and ``layer`` is the name of the layer.
    """

    compute: Callable[..., None]
    operands: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    prepare: Callable[[], None] | None = None
    layer: str = ""

    def check(self, microbatch: int) -> None:
        """Raise a UsageError if an operand has been changed in place since B."""
        if tuple(operand._version for operand in self.operands) != self.versions:
            raise UsageError(
                f"an operand of the weight gradient of {self.layer or 'a layer'} was changed in "
                f"place between B and W of microbatch {microbatch}: an operation, such as a custom "
                "backward, overwrites the input or the output gradient of that layer; let it "
                "return a new tensor"
            )


class WeightGradQueue:
    """The deferred weight gradients of one model chunk.

    Layers ask :attr:`deferring` in their backward and hand over a task if it is true. Tasks are
    carried out one microbatch at a time, oldest first, in the order their layers ran backward, so
    that sums are formed in the order of an unsplit backward. ``scratch`` is what the layers want to
    remember of one another within the B that runs. ``on_gradient`` is called with every weight
    whose gradient W has computed, ``on_task`` with the weights of each task before it is carried
    out, and with none after the last.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.scratch: dict[Any, Any] = {}
        self.activation_memory: ActivationMemory | None = None
        self.on_gradient: Callable[[torch.Tensor], None] | None = None
        self.on_task: Callable[[tuple[torch.Tensor, ...]], None] | None = None
        self._awaited: set[int] = set()
        self._microbatches: deque[tuple[int, deque[WeightGradTask]]] = deque()
        self._without_graph = torch.no_grad()  # one for all W, as none runs inside another

    @contextmanager
    def collecting(self, microbatch: int) -> Iterator[None]:
        """Collect the weight gradients of the B that runs inside."""
        self.begin(microbatch)
        try:
            yield
        finally:
            self.end()

    def begin(self, microbatch: int) -> None:
        """Begin to collect the weight gradients of a B, until :meth:`end`."""
        self._microbatches.append((microbatch, deque()))
        self.deferring = True

    def end(self) -> None:
        """End the collection: the B has ended, or failed."""
        self.deferring = False
        self.scratch = {}
        self._awaited = set()

    def awaits(self, weight: torch.Tensor) -> bool:
        """Return whether the B that runs has left a gradient of a weight to W."""
        return id(weight) in self._awaited

    def defer(
        self,
        compute: Callable[..., None],
        *operands: torch.Tensor,
        weights: Iterable[torch.Tensor] = (),
        prepare: Callable[[], None] | None = None,
        layer: str = "",
    ) -> None:
        """Leave ``compute(*operands)``, the gradients of ``weights``, to this microbatch's W.

        ``prepare`` is called before the task ahead of it is computed. ``layer`` names the layer in
        errors.
        """
        if self.activation_memory is not None:
            for tensor in operands:
                self.activation_memory.hold(tensor)
        weights = tuple(weights)
        self._awaited.update(map(id, weights))
        versions = tuple(operand._version for operand in operands)
        task = WeightGradTask(compute, operands, weights, versions, prepare, layer)
        self._microbatches[-1][1].append(task)

    def weights(self, microbatch: int) -> Counter[int]:
        """Count the gradients that W of a microbatch computes for each weight, by its ``id``."""
        tasks = (
            task for number, held in self._microbatches for task in held if number == microbatch
        )
        return Counter(id(weight) for task in tasks for weight in task.weights)

    def run(self, microbatch: int) -> None:
        """Carry out the weight gradients of a microbatch, which must be the oldest collected.

        Raises:
            RuntimeError: another microbatch is older; sums would be formed in another order.
            UsageError: what a weight gradient is computed from has been changed in place since B.
        """
        if not self._microbatches or self._microbatches[0][0] != microbatch:
            oldest = self._microbatches[0][0] if self._microbatches else "none"
            raise RuntimeError(f"W of microbatch {microbatch} is due after that of {oldest}")
        _, tasks = self._microbatches.popleft()
        memory, on_gradient, on_task = self.activation_memory, self.on_gradient, self.on_task
        with self._without_graph:
            _prepare_first(tasks)
            while tasks:
                task = tasks.popleft()
                task.check(microbatch)
                compute, operands, weights = task[:3]
                if on_task is not None:
                    on_task(weights)
                _prepare_first(tasks)
                compute(*operands)
                if memory is not None:
                    for tensor in operands:
                        memory.release(tensor)
                del task, compute, operands  # freed before the next task makes something as large
                if on_gradient is not None:
                    for weight in weights:
                        on_gradient(weight)
            if on_task is not None:
                on_task(())

    def __len__(self) -> int:
        return len(self._microbatches)


def _prepare_first(tasks: deque[WeightGradTask]) -> None:
    if tasks and (prepare := tasks[0].prepare) is not None:
        prepare()
