"""Snapshots of what one step of Megatron's optimizer changes on this rank, to undo the step.

Serves Megatron's optimizers over torch's or Transformer-Engine's Adam and SGD. These change the
parameters they were given, the state of each, and the counts of each group of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class OptimizerSnapshot:
    """A copy of the parameters and states of optimizers; its memory is reused every step.

    On a GPU the host waits for no copy: taking, the optimizer's step and restoring follow one
    another on the current stream, and nothing but a later copy on it reads the host's memory, which
    is pinned.

    Args:
        optimizers: Megatron's, each around one of torch's; those around none are left out.
        on_host: keep the copies in host memory.
    """

    def __init__(self, optimizers: list[Any], *, on_host: bool = False) -> None:
        self._optimizers = [o for o in optimizers if not is_stub(o)]
        self._on_host = on_host
        self._copies: dict[tuple[int, str], torch.Tensor] = {}
        self._states: list[dict[str, Any] | None] = []

    def take(self) -> None:
        """Copy parameters and states, over the copies of the previous step."""
        self._states = []
        for parameter, states in self._parameters():
            self._copy(parameter, "", parameter.data)
            state = states.get(parameter)  # it has none before its first step
            self._states.append(
                None
                if state is None
                else {
                    name: self._copy(parameter, name, value) if torch.is_tensor(value) else value
                    for name, value in state.items()
                }
            )

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied parameters and states; the model's copies of them are not updated."""
        for (parameter, states), values in zip(self._parameters(), self._states, strict=True):
            parameter.data.copy_(self._copies[id(parameter), ""], non_blocking=True)
            if values is None:
                states.pop(parameter, None)
            else:
                _restore_state(states[parameter], values)

    @property
    def nbytes(self) -> int:
        """Bytes of a copy, including the states that the first step will create."""
        total = 0
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    states = optimizer.optimizer.state.get(parameter)
                    own = _nbytes(parameter)
                    total += own + (
                        _averages(group) * own
                        if states is None
                        else sum(map(_nbytes, states.values()))
                    )
        return total

    def _parameters(self) -> Iterator[tuple[torch.Tensor, dict[torch.Tensor, dict[str, Any]]]]:
        """Yield every parameter, with the mapping that may hold its state."""
        for optimizer in self._optimizers:
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer.optimizer.state

    def _copy(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get((id(parameter), name))
        if copy is None:
            device = torch.device("cpu") if self._on_host else value.device
            pinned = self._on_host and value.device.type == "cuda"
            copy = torch.empty_like(value, device=device, pin_memory=pinned)
            self._copies[id(parameter), name] = copy
        copy.copy_(value, non_blocking=True)
        return copy


def _averages(group: dict[str, Any]) -> int:
    """Count the tensors an optimizer will keep for a parameter, of its size: Adam two, SGD one."""
    return 2 if "betas" in group else int(bool(group.get("momentum")))


def _nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if torch.is_tensor(value) else 0


def _restore_state(state: dict[str, Any], values: dict[str, Any]) -> None:
    for name in state.keys() - values.keys():
        del state[name]
    for name, value in values.items():
        if torch.is_tensor(value):
            state[name].copy_(value, non_blocking=True)
        else:
            state[name] = value


class GroupOptions:
    """A copy of the options of the parameter groups: learning rate, steps, ..."""

    def __init__(self, optimizers: list[Any]) -> None:
        self._groups = [g for o in optimizers if not is_stub(o) for g in o.optimizer.param_groups]
        self._values = [
            {name: _own(value) for name, value in group.items() if name != "params"}
            for group in self._groups
        ]

    def restore(self, *names: str) -> None:
        """Restore the options of these names in all groups, or all options without names."""
        for group, values in zip(self._groups, self._values, strict=True):
            for name in names or values:
                if torch.is_tensor(group.get(name)) and torch.is_tensor(values[name]):
                    group[name].copy_(values[name])
                else:
                    group[name] = _own(values[name])
            for name in [] if names else [n for n in group if n not in values and n != "params"]:
                del group[name]


def is_stub(optimizer: Any) -> bool:
    """Return whether there is nothing to optimize, as on a rank where everything is frozen."""
    return bool(getattr(optimizer, "is_stub_optimizer", False))


def bring_to_model(optimizers: list[Any]) -> None:
    """Copy the optimizers' parameters to the model, and gather them, as after a step."""
    for optimizer in optimizers:
        if not is_stub(optimizer):
            with _idle(optimizer.optimizer):
                optimizer.step_with_ready_grads()


@contextmanager
def _idle(optimizer: Any) -> Iterator[None]:
    """Let Megatron do everything in a step except for the step of torch's optimizer."""
    own = vars(optimizer).get("step")
    optimizer.step = lambda: None
    try:
        yield
    finally:
        del optimizer.step
        if own is not None:
            optimizer.step = own


def _own(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else value
