"""What a rank does that ends for a mistake of all: it speaks or waits, and how long."""

from __future__ import annotations

import faulthandler
import os
import time

import pytest

from megatron_zb import errors
from megatron_zb.errors import UsageError, end_with


class Ended(Exception):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("ranks", "rank", "speaks", "waits"),
    [
        (None, 0, None, []),
        ("1", 0, None, []),
        ("2", 0, None, [errors._TIME_FOR_OTHERS]),
        ("2", 1, None, [errors._TIME_FOR_RANK_0]),
        ("2", 1, True, [errors._TIME_FOR_OTHERS]),
        ("2", 0, False, [errors._TIME_FOR_RANK_0]),
    ],
)
def test_one_rank_speaks_and_waits_for_the_others(
    ranks: str | None,
    rank: int,
    speaks: bool | None,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A process without others waits for nobody."""
    slept: list[float] = []
    unregistered: list[int] = []
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(faulthandler, "unregister", unregistered.append)
    monkeypatch.setattr(os, "_exit", end)
    if ranks is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(Ended):
        end_with(UsageError("a mistake"), rank, speaks=speaks)
    assert codes == [2]
    assert slept == waits
    assert bool(unregistered) is (errors._TIME_FOR_RANK_0 in waits)
    assert capsys.readouterr().err == "megatron_zb: error: a mistake\n"
