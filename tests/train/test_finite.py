"""Check of losses for NaN and infinity, without a wait of the host for each."""

from __future__ import annotations

import pytest
import torch
from ranks import RankPools

from megatron_zb.train import finite
from megatron_zb.train.finite import LossCheck, NotFinite, said_in_a_sentence


class Copied:
    """A stand-in for the event behind a copy to the host: it has come when a test says so."""

    def __init__(self) -> None:
        self.has_come = False
        self.waited = False

    def query(self) -> bool:
        return self.has_come

    def synchronize(self) -> None:
        self.waited = True


def read_in_turn(values: list[float], come: int) -> tuple[int, list[bool], str]:
    """Losses checked one after the other, of whose copies the first ``come`` have come at once.

    Returns how many were added before an error, which copies were waited for, and the error.
    """
    made: list[Copied] = []

    def copy(loss: torch.Tensor) -> tuple[torch.Tensor, Copied]:
        made.append(Copied())
        made[-1].has_come = len(made) <= come
        return loss, made[-1]

    check, error = LossCheck(), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finite, "_copy_to_host", copy)
        try:
            for value in values:
                check.add(torch.tensor(value))
            check.finish()
        except RuntimeError as caught:
            error = str(caught)
    return len(made), [copied.waited for copied in made], error


def said_of(value: float) -> str:
    check = LossCheck()
    check.add(torch.tensor(1.0))
    try:
        with said_in_a_sentence(3):
            check.add(torch.tensor(value))
    except NotFinite as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("value", "what"), [("nan", "NaN"), ("inf", "Inf"), ("-inf", "Inf"), ("1", "")]
)
def test_a_loss_on_the_cpu_is_checked_at_once(ranks: RankPools, value: str, what: str) -> None:
    (said,) = ranks(1).run(said_of, value=float(value))
    if not what:
        assert said == ""
        return
    assert said.startswith(f"rank 0 found {what} in local forward loss calculation, in iteration 3")


def test_a_loss_is_read_when_its_copy_has_come(ranks: RankPools) -> None:
    ((added, waited, error),) = ranks(1).run(read_in_turn, values=[1.0, float("nan"), 1.0], come=2)
    assert (added, waited) == (2, [False, False])
    assert "found NaN" in error


def test_the_end_of_an_iteration_waits_for_all_losses(ranks: RankPools) -> None:
    ((added, waited, error),) = ranks(1).run(read_in_turn, values=[1.0, float("inf")], come=0)
    assert (added, waited) == (2, [True, True])
    assert "found Inf" in error
