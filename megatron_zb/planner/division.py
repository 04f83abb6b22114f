"""Error message for GPUs that cannot be divided as the user asks, with the nearest division."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from megatron_zb.parsing import flag_of
from megatron_zb.planner.device import DeviceConfig
from megatron_zb.planner.model import ModelConfig
from megatron_zb.planner.strategy import Choices, Strategy, strategies

_FLAGS = {"microbatch": "--micro-batch-size"}
_FARTHEST = 64  # numbers of GPUs that are looked at on either side


def said_of_none(
    model: ModelConfig, device: DeviceConfig, gpus: int, global_batch: int, choices: Choices
) -> str:
    """Describe sizes that cannot be divided: the flag to change, and the values that would do."""
    free = [f.name for f in fields(choices) if f.default is None]
    asked = [name for name in free if getattr(choices, name) is not None]
    for name in asked:
        any_value: dict[str, Any] = {name: None}
        others = replace(choices, **any_value)
        possible = {getattr(s, name) for s in strategies(model, device, gpus, global_batch, others)}
        if possible:
            return (
                f"{_flag(name)} {_listed(getattr(choices, name))} cannot be had for {model.name} "
                f"on {gpus} GPUs{_rest(asked, name)}: {_flag(name)} can be {_describe(possible)}"
            )
    problem = (
        f"{gpus} GPUs, a global batch of {global_batch} and the {model.attention_heads} heads and "
        f"{model.layers} layers of {model.name} cannot be divided among one another"
    )
    if asked and _is_possible(strategies(model, device, gpus, global_batch, Choices())):
        flags = " and ".join(map(_flag, asked))
        return f"{problem} with {flags} as given: leave one of them out"
    for batch in _batches(gpus, global_batch):
        if _is_possible(strategies(model, device, gpus, batch, choices)):
            return f"{problem}: --global-batch-size {batch} can be"
    for number in _neighbours(gpus):
        if _is_possible(strategies(model, device, number, global_batch, choices)):
            return f"{problem}: --gpus {number} can be"
    return f"{problem}: give another number of GPUs, such as --gpus {device.node.gpus}"


def _is_possible(found: Iterator[Strategy]) -> bool:
    return any(True for _ in found)


def _flag(name: str) -> str:
    return _FLAGS.get(name, flag_of(name))


def _rest(asked: list[str], name: str) -> str:
    others = [_flag(other) for other in asked if other != name]
    return f" with {' and '.join(others)} as given" if others else ""


def _listed(values: tuple[object, ...]) -> str:
    return ",".join(map(str, values))


def _describe(values: set[object]) -> str:
    """List values in order, with `or` before the last."""
    *first, last = map(str, sorted(values, key=lambda v: (isinstance(v, str), v)))
    return f"{', '.join(first)} or {last}" if first else last


def _batches(gpus: int, global_batch: int) -> Iterator[int]:
    """Yield batches that every number of data-parallel ranks divides, the nearest first."""
    below = global_batch - global_batch % gpus
    yield from (batch for batch in (below, below + gpus) if batch)


def _neighbours(gpus: int) -> Iterator[int]:
    for step in range(1, _FARTHEST + 1):
        yield from (number for number in (gpus - step, gpus + step) if number > 0)
