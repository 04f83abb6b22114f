"""A stage computed by autograd, with its backward whole or split.

Weight gradients are made in B and carried out in W, in the microbatch order of B.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_zb.errors import UsageError
from megatron_zb.runtime.activation_memory import ActivationMemory, OffloadedActivations


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


def _backward(edge: GradientEdge, gradient: torch.Tensor | None) -> None:
    """Run autograd backward from the edge of an output.

    ``torch.autograd.backward`` first looks at the gradient's shape in Python, in every pass. The
    engine looks at it once more. Megatron also calls the engine.
    """
    if gradient is None:
        torch.autograd.backward(edge)  # makes the gradient of a loss
        return
    Variable._execution_engine.run_backward(
        (edge,),
        (gradient,),
        False,  # keep_graph
        False,  # create_graph
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _saving_nothing() -> AbstractContextManager[Any]:
    """Return a context whose operations save nothing for a backward, as none will come."""
    return torch.autograd.graph.saved_tensors_hooks(_drop, _refuse)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _refuse(saved: None) -> torch.Tensor:
    raise UsageError(
        "a forward that --pipeline-recompute recomputes computes gradients itself, such as by "
        "torch.autograd.grad, from activations that are not kept: leave the flag out for this model"
    )


class AutogradStage:
    """A stage whose forward is a function of torch tensors.

    ``compute(microbatch, activation)`` returns the stage's output, or the loss on the last stage.
    Only the output's place in the graph is kept, never its data: the data goes with the message
    and is freed when that has been sent, unless an operation saved it for itself. Of microbatches
    in :attr:`recomputed`, F keeps only the input, and R computes the rest again. Of those in
    :attr:`offloaded`, :attr:`offload` takes what F saves to the host and back.
    """

    recomputed: Collection[int] = ()
    offloaded: Collection[int] = ()
    offload: OffloadedActivations | None = None
    staying: Collection[int] = ()
    """Addresses of storages that stay on the device, whatever a forward saves of them."""

    def __init__(
        self,
        compute: Callable[[int, torch.Tensor | None], torch.Tensor],
        weight_grads: WeightGradQueue,
        *,
        is_last: bool,
        forward_only: bool = False,
    ) -> None:
        self._compute = compute
        self._weight_grads = weight_grads
        self._is_last = is_last
        self._forward_only = forward_only
        self._live: dict[int, tuple[torch.Tensor | None, Any]] = {}
        self._inputs: dict[int, torch.Tensor | None] = {}
        self._is_dropping = False
        self.activation_memory: ActivationMemory | None = None

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run F: from the previous stage's activation to this stage's (None at either end)."""
        if microbatch in self.recomputed:
            return self._forward_dropped(microbatch, activation)
        if microbatch in self.offloaded:
            return self._forward_offloaded(microbatch, activation)
        if activation is not None and not self._forward_only:
            activation.requires_grad_()
        output = self._compute(microbatch, activation)
        if not self._forward_only:
            self._hold(activation)
            self._live[microbatch] = (activation, self._start_of_backward(output))
        return None if self._is_last else output.detach()

    def _forward_dropped(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Run a forward with gradients, as layers may compute other things without, but keep none.

        Its graph is freed at its end, and refers to none of the tensors that B would need.
        """
        self._hold(activation)
        self._inputs[microbatch] = activation
        if activation is not None:
            activation.requires_grad_()
        self._is_dropping = True
        try:
            with _saving_nothing(), self._remembering(microbatch):
                output = self._compute(microbatch, activation)
        finally:
            self._is_dropping = False
        return None if self._is_last else output.detach()

    def recompute(self, microbatch: int) -> None:
        """Run R: repeat a forward that kept only its input, now with all that B needs."""
        activation = self._inputs.pop(microbatch)
        with self._repeating(microbatch):
            output = self._compute(microbatch, activation)
        self._live[microbatch] = (activation, self._start_of_backward(output))

    def _forward_offloaded(
        self, microbatch: int, activation: torch.Tensor | None
    ) -> torch.Tensor | None:
        assert self.offload is not None
        if activation is not None:
            activation.requires_grad_()
        with self.offload.saving(microbatch):
            output = self._compute(microbatch, activation)
        self._live[microbatch] = (activation, self._start_of_backward(output))
        if activation is not None:  # its gradient will have its shape; its data is offloaded, too
            activation.data = activation.new_empty(1).expand(activation.shape)
        self.offload.begin_copy_out(microbatch)
        return None if self._is_last else output.detach()

    def end_copy_out(self, microbatch: int) -> None:
        """Run D: wait until the copy to the host has ended, and free the copied memory."""
        assert self.offload is not None
        self.offload.end_copy_out(microbatch)

    def begin_copy_in(self, microbatch: int) -> None:
        """Run H: take memory on the device, and begin the copy from the host."""
        assert self.offload is not None
        self.offload.begin_copy_in(microbatch)

    def _remembering(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a forward that is to run again."""
        return nullcontext()

    def _repeating(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context in which it computes the same again."""
        return nullcontext()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run BW: from the gradient of the output to that of the input, weights included."""
        activation, start = self._live.pop(microbatch)
        if self.offload is not None and microbatch in self.offloaded:
            self.offload.end_copy_in(microbatch)
        if start is not None:
            self._run_backward(start, gradient)
        if activation is None:
            return None
        self._release(activation)
        return activation.grad

    def backward_input(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run B: from the gradient of the output to that of the input, weights left for W."""
        self._weight_grads.begin(microbatch)
        try:
            return self.backward(microbatch, gradient)
        finally:
            self._weight_grads.end()

    def backward_weight(self, microbatch: int) -> None:
        """Run W: the weight gradients that B has left."""
        self._weight_grads.run(microbatch)

    def reset(self) -> None:
        """Forget the forwards that have run; their backward will not come."""
        for activation in (*(input for input, _ in self._live.values()), *self._inputs.values()):
            if activation is not None:
                self._release(activation)
        self._live.clear()
        self._inputs.clear()
        if self.offload is not None:
            self.offload.reset()

    def _start_of_backward(self, output: torch.Tensor) -> Any:
        """Return what the backward of a forward needs, None if it needs no backward."""
        return get_gradient_edge(output) if output.requires_grad else None

    def _run_backward(self, start: Any, gradient: torch.Tensor | None) -> None:
        _backward(start, gradient)

    def _hold(self, activation: torch.Tensor | None) -> None:
        if self.activation_memory is not None and activation is not None:
            self.activation_memory.hold(activation)

    def _release(self, activation: torch.Tensor) -> None:
        if self.activation_memory is not None:
            self.activation_memory.release(activation)
