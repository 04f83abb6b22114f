"""Rules for updates that come late: what is added to a step of the optimizer, and where to compute.

With an update delay of one, a group of microbatches computes with weights that lack the newest
update, and its own update is applied to the newest weights. A rule changes one of two things: how
an optimizer's step is applied (``step``), or which weights the next group computes with
(``ahead``). It knows nothing of pipelines.

The weights are those that the optimizer steps, in float32: differences between two steps get lost
in bf16. All calls give them in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from megatron_zb.errors import UsageError


class UpdateRule:
    """Rule that changes nothing: late updates as they are."""

    def step(self, parameters: Sequence[Tensor], step: Callable[[], object]) -> None:
        """Run an optimizer's step, and correct what it has done.

        Args:
            parameters: all that the step may change. One whose ``grad`` is None now is not stepped.
            step: changes the parameters in place. It is called once.
        """
        step()

    def check(self, optimizer: Optimizer) -> None:
        """Check that the rule knows what it needs of an optimizer.

        Raises:
            UsageError: it does not.
        """

    def ahead(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> list[Tensor] | None:
        """Return the weights to compute the next group with; None for the parameters themselves.

        Args:
            parameters: after the newest step.
            optimizer: whose ``lr`` is that of the next step.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers, which the next step may change in place."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what another rule of this kind has returned, as a copy."""


class PlainUpdate(UpdateRule):
    """Late updates as they are: the rule of PipeDream-2BW, arXiv 2006.09503."""


class _Remembering(UpdateRule):
    """Rule that keeps the newest update of each parameter: all that the step has subtracted."""

    def __init__(self) -> None:
        self._updates: list[Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        updates = state["updates"]
        self._updates = None if updates is None else [it.detach().clone() for it in updates]


class ErrorFeedback(_Remembering):
    """Rule that adds the change of the update: x <- x - u_t - c (u_t - u_{t-1}).

    u_t is the whole change of the optimizer's step: learning rate, decoupled weight decay and
    orthogonalization included. The update before keeps the learning rate that it had. The first
    step is ordinary. A parameter without a gradient stays as the optimizer leaves it, and counts
    as one whose update is zero.

    Holds one tensor per parameter, and a second one during a step.
    Source: error feedback for a delay of one step, arXiv 2606.30634.

    Args:
        strength: c, at least 0. With 1, and but for weight decay and the first update, the weights
            are those that ``LinearPrediction`` of one step computes with.

    Raises:
        UsageError: the strength is negative.
    """

    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        if not strength >= 0:
            raise UsageError(f"an error feedback of strength {strength:g} must be 0 or more")
        self.strength = strength

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor], step: Callable[[], object]) -> None:
        is_stepped = [it.grad is not None for it in parameters]
        updates = [it.detach().clone() for it in parameters]
        step()
        for update, parameter in zip(updates, parameters, strict=True):
            update.sub_(parameter)
        if self._updates is not None:
            kept = zip(parameters, updates, self._updates, is_stepped, strict=True)
            for parameter, update, before, corrected in kept:
                if corrected:
                    parameter.add_(before.sub_(update), alpha=self.strength)
        for update, stepped in zip(updates, is_stepped, strict=True):
            if not stepped:
                update.zero_()
        self._updates = updates


class LinearPrediction(_Remembering):
    """Rule that computes ahead along the newest update: W - s u_t, for any optimizer.

    Holds one tensor per parameter.
    Source: linear weight prediction in its form of weights, arXiv 2003.11666.

    Args:
        steps: s, how many updates to look ahead.
    """

    def __init__(self, steps: float = 1.0) -> None:
        super().__init__()
        self.steps = steps

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor], step: Callable[[], object]) -> None:
        updates = [it.detach().clone() for it in parameters]
        step()
        self._updates = [was.sub_(it) for was, it in zip(updates, parameters, strict=True)]

    @torch.no_grad()
    def ahead(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> list[Tensor] | None:
        if self._updates is None:
            return None
        moved = zip(parameters, self._updates, strict=True)
        return [it.detach().sub(update, alpha=self.steps) for it, update in moved]


class WeightPrediction(UpdateRule):
    """Rule that computes ahead along the optimizer's momentum: W - s lr dW.

    With SGD, dW is the momentum; with Adam and AdamW the ratio of the corrected moments, as in a
    step, and AdamW's decay is added. They are those of the newest step, so a coupled weight decay
    is in them. A parameter that has not been stepped yet stays as it is. FusedAdam of apex and
    Transformer Engine is one or the other of these.
    Sources: XPipe, arXiv 1911.04610; PipeOptim, arXiv 2312.00839.

    Args:
        steps: s, how many updates to look ahead.
    """

    def __init__(self, steps: float = 1.0) -> None:
        self.steps = steps

    def check(self, optimizer: Optimizer) -> None:
        """Check that the formula of an optimizer is known.

        Raises:
            UsageError: the optimizer is none of these, or its step has an option that the formula
                lacks.
        """
        _formula_of(optimizer)

    @torch.no_grad()
    def ahead(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> list[Tensor] | None:
        """Return the predicted weights.

        Raises:
            UsageError: as ``check`` does.
        """
        predict = _formula_of(optimizer)
        options = {it: group for group in optimizer.param_groups for it in group["params"]}
        return [
            predict(it.detach(), optimizer.state[it], options[it], self.steps)
            if optimizer.state.get(it)
            else it.detach().clone()
            for it in parameters
        ]


_Formula = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any], float], Tensor]
"""Predicts a weight from itself, its state, the options of its group, and the steps ahead."""


def _formula_of(optimizer: Optimizer) -> _Formula:
    """Return the formula of an optimizer, if it fits all groups."""
    name = type(optimizer).__name__
    others = "or predict linearly from the weights"
    if isinstance(optimizer, SGD):
        formula: _Formula = _by_momentum
        options: tuple[str, ...] = ("nesterov", "maximize")
    elif isinstance(optimizer, (Adam, AdamW)):
        formula = partial(_by_moments, decoupled=isinstance(optimizer, AdamW))
        options = ("amsgrad", "maximize")
    elif name == "FusedAdam":
        formula = partial(_by_moments, decoupled=bool(getattr(optimizer, "adam_w_mode", True)))
        options = ()
    else:
        raise UsageError(
            f"weights cannot be predicted from the state of {name}: give SGD with momentum, Adam "
            f"or AdamW, {others}"
        )
    for group in optimizer.param_groups:
        for option in options:
            if group[option]:
                raise UsageError(
                    f"weights cannot be predicted from the state of {name} with {option}: leave "
                    f"it out, {others}"
                )
        if not group.get("momentum", True):
            raise UsageError(
                f"weights cannot be predicted from the state of {name} without momentum, which "
                f"is empty: give it a momentum, {others}"
            )
    return formula


def _by_momentum(
    weight: Tensor, state: Mapping[str, Any], options: Mapping[str, Any], steps: float
) -> Tensor:
    return weight.sub(state["momentum_buffer"], alpha=steps * float(options["lr"]))


def _by_moments(
    weight: Tensor,
    state: Mapping[str, Any],
    options: Mapping[str, Any],
    steps: float,
    *,
    decoupled: bool,
) -> Tensor:
    far = steps * float(options["lr"])
    step = float(state["step"] if "step" in state else options["step"])  # fused: one of a group
    is_corrected = options.get("bias_correction", True)
    first, second = (1 - is_corrected * float(beta) ** step for beta in options["betas"])
    size = (state["exp_avg_sq"] / second).sqrt_().add_(options["eps"])
    moved = weight.addcdiv(state["exp_avg"], size, value=-far / first)
    if decoupled or options.get("decoupled_weight_decay"):
        moved.sub_(weight, alpha=far * float(options["weight_decay"]))
    return moved
