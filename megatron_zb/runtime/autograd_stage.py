"""A stage computed by autograd, with its backward whole or split."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.offload import MovedActivations
from megatron_zb.runtime.weight_grad import WeightGradQueue


def _backward(edge: GradientEdge, gradient: torch.Tensor | None) -> None:
    """Run autograd backward from the edge of an output.

    ``torch.autograd.backward`` first looks at the gradient's shape in Python, in every pass. The
    engine looks at it once more. Megatron calls the engine, too.
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


class AutogradStage:
    """A stage whose forward is a function of torch tensors.

    ``compute(microbatch, activation)`` returns the stage's output, or the loss on the last stage.
    Only the output's place in the graph is kept, never its data: the data goes with the message
    and is freed when that has been sent, unless an operation saved it for itself. Of microbatches
    in :attr:`dropped`, F keeps the input alone, and R computes the rest again. Of those in
    :attr:`moved`, :attr:`moves` takes what F saves to the host and back.
    """

    dropped: Collection[int] = ()
    moved: Collection[int] = ()
    moves: MovedActivations | None = None

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
        self.activation_memory: ActivationMemory | None = None

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        """Run F: from the previous stage's activation to this stage's (None at either end)."""
        if microbatch in self.dropped:
            return self._forward_dropped(microbatch, activation)
        if microbatch in self.moved:
            return self._forward_moved(microbatch, activation)
        if activation is not None and not self._forward_only:
            activation.requires_grad_()
        output = self._compute(microbatch, activation)
        if not self._forward_only:
            self._hold(activation)
            self._live[microbatch] = (activation, self._start_of_backward(output))
        return None if self._is_last else output.detach()

    def _forward_dropped(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        self._hold(activation)
        self._inputs[microbatch] = activation
        with torch.no_grad(), self._remembering(microbatch):
            output = self._compute(microbatch, activation)
        return output.detach()  # parts of Megatron's layers turn gradients on again

    def recompute(self, microbatch: int) -> None:
        """Run R: repeat a forward that kept only its input, now with all that B needs."""
        activation = self._inputs.pop(microbatch)
        if activation is not None:
            activation.requires_grad_()
        with self._repeating(microbatch):
            output = self._compute(microbatch, activation)
        self._live[microbatch] = (activation, self._start_of_backward(output))

    def _forward_moved(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        assert self.moves is not None
        if activation is not None:
            activation.requires_grad_()
        with self.moves.saving(microbatch):
            output = self._compute(microbatch, activation)
        self._live[microbatch] = (activation, self._start_of_backward(output))
        if activation is not None:  # its gradient will have its shape; its data moves, too
            activation.data = activation.new_empty(1).expand(activation.shape)
        self.moves.begin_copy_out(microbatch)
        return output.detach()

    def end_copy_out(self, microbatch: int) -> None:
        """Run D: wait until the copy to the host has ended, and free the copied memory."""
        assert self.moves is not None
        self.moves.end_copy_out(microbatch)

    def begin_copy_in(self, microbatch: int) -> None:
        """Run H: take memory on the device, and begin the copy from the host."""
        assert self.moves is not None
        self.moves.begin_copy_in(microbatch)

    def _remembering(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context of a forward that is to run again."""
        return nullcontext()

    def _repeating(self, microbatch: int) -> AbstractContextManager[None]:
        """Return the context in which it computes the same again."""
        return nullcontext()

    def backward(self, microbatch: int, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Run BW: from the gradient of the output to that of the input, weights included."""
        activation, start = self._live.pop(microbatch)
        if self.moves is not None and microbatch in self.moved:
            self.moves.end_copy_in(microbatch)
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
        if self.moves is not None:
            self.moves.reset()

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
