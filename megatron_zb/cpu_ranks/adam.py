"""Torch's Adam under Megatron's distributed optimizer."""

from __future__ import annotations

from typing import Any

import torch


def redirect_adam() -> None:
    """Adapt torch's Adam to Megatron's distributed optimizer, which expects a GPU's fused one.

    Megatron asks a fresh optimizer for its state before it loads a checkpoint into it, but torch's
    makes it at the first step; and it takes every entry of a parameter's state for a tensor of the
    parameter's shape, so the number of steps has to be kept with the group. An optimizer without
    parameters, such as that of experts on a rank that holds none, also has to have steps.
    """
    optim: Any = torch.optim

    class AdamW(torch.optim.AdamW):
        def _steps_to_parameters(self) -> None:
            for group in self.param_groups:
                steps = float(group.get("step", 0))
                for parameter in group["params"]:
                    if self.state[parameter]:  # a step that a resume has set there counts
                        self.state[parameter].setdefault("step", torch.tensor(steps))

        def _steps_to_groups(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    step = self.state[parameter].pop("step", None)
                    if step is not None:
                        group["step"] = int(step)

        def step(self, closure: Any = None) -> Any:
            self._steps_to_parameters()
            loss = super().step(closure)
            self._steps_to_groups()
            for group in self.param_groups:
                if not group["params"]:
                    group["step"] = group.get("step", 0) + 1
            return loss

        def state_dict(self) -> dict[str, Any]:
            for group in self.param_groups:
                for parameter in group["params"]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            self._steps_to_parameters()
            state: dict[str, Any] = super().state_dict()
            state["state"] = {key: dict(value) for key, value in state["state"].items()}
            if not state["state"]:
                step = max(group.get("step", 0) for group in self.param_groups)
                state["state"] = {0: {"step": torch.tensor(float(step))}}
            self._steps_to_groups()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # Megatron stores no number of steps while it is 0, as where fp16 skips the first ones
            states = {
                key: {"step": torch.tensor(0.0), **state} if state else state
                for key, state in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": states})
            self._steps_to_groups()

    optim.AdamW = AdamW
