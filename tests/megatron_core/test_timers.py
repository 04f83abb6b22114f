"""Megatron's timers around a pass and around a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zb.megatron_core.step import timed


class Timers:
    """Stand in for Megatron's timers: what was started and stopped, and with which barrier."""

    def __init__(self) -> None:
        self.did: list[Any] = []

    def __call__(self, name: str, log_level: int) -> Timers:
        self.did.append((name, log_level))
        return self

    def start(self, barrier: bool) -> None:
        self.did.append(barrier)

    def stop(self) -> None:
        self.did.append("stop")


def test_a_pass_is_timed_without_a_barrier() -> None:
    """Ranks run different passes: one that waited for all others would wait for ever."""
    timers = Timers()
    with timed(SimpleNamespace(timers=timers), "backward-compute", log_level=2):
        assert timers.did == [("backward-compute", 2), False]
    assert timers.did[-1] == "stop"


@pytest.mark.parametrize("barrier", [False, True])
def test_a_step_has_the_barrier_that_is_asked_for(barrier: bool) -> None:
    timers = Timers()
    with timed(SimpleNamespace(timers=timers), "forward-backward", log_level=1, barrier=barrier):
        assert timers.did == [("forward-backward", 1), barrier]


def test_without_timers_nothing_is_timed() -> None:
    with timed(SimpleNamespace(timers=None), "forward-backward", log_level=1):
        pass
