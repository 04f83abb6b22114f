"""Stages that sleep: a pair sleeps for what its two sides compute and, beside it, all_to_all."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import overlapped_stages
import pytest
from overlapped_stages import OverlappedStage, SleepingCopies, run_together

from megatron_zb import schedules
from megatron_zb.runtime.executor import Side
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import v_shape


@pytest.mark.parametrize(("kind", "backward"), [(PassKind.B, 0.012), (PassKind.BW, 0.02)])
def test_each_side_of_a_pair_exchanges_beside_the_computation_of_the_other(
    kind: PassKind, backward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = schedules.Costs.uniform(pipeline_size=2, forward=0.02, backward=0.024, weight=0.016)
    table = costs.having(Communication(forward=0.01, backward=0.008)).for_placement(v_shape(2))
    main = threading.current_thread()
    slept: list[tuple[bool, float]] = []

    def sleep(share: float) -> None:
        slept.append((threading.current_thread() is main, share))
        time.sleep(share)

    monkeypatch.setattr(overlapped_stages, "time", SimpleNamespace(sleep=sleep))
    first, last = OverlappedStage(0, table), OverlappedStage(3, table)
    made = run_together(Side(PassKind.F, last, 1, (None,)), Side(kind, last, 0, (None,)))
    computed = [share for is_main, share in slept if is_main]
    exchanged = [share for is_main, share in slept if not is_main]
    assert computed == pytest.approx([0.005, backward / 2] * 2)
    assert exchanged == pytest.approx([0.002, 0.0025] * 2)
    pair = Pair(Pass(PassKind.F, 3, 1), Pass(kind, 3, 0))
    assert table.pair_seconds(pair) == pytest.approx(sum(computed))
    assert all(message is not None for message in made), "the executor drops what nobody reads"
    alone = [first._all_to_all_seconds(kind, 0) for kind in (PassKind.W, PassKind.R)]
    assert alone == [0.0, 0.0]
    slept.clear()
    first.forward(0, None)
    assert [(is_main, round(share, 6)) for is_main, share in slept] == [
        (True, 0.01),
        (False, 0.005),
    ]


def test_an_offloaded_microbatch_sleeps_for_its_copies_in_threads_that_d_and_b_wait_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = schedules.Costs.uniform(pipeline_size=2, forward=0.02, backward=0.024, weight=0.016)
    table = costs.having(Offload(seconds=0.06)).for_placement(v_shape(2))
    main = threading.current_thread()
    slept: list[tuple[bool, float]] = []
    copied = threading.Event()

    def sleep(seconds: float) -> None:
        assert threading.current_thread() is main or copied.wait(60)
        slept.append((threading.current_thread() is main, round(seconds, 6)))

    monkeypatch.setattr(overlapped_stages, "time", SimpleNamespace(sleep=sleep))
    stage = OverlappedStage(0, table, SleepingCopies(table))
    stage.offloaded = {1}
    stage.forward(0, None)
    stage.forward(1, None)
    assert slept == [(True, 0.01)] * 2, "the copy out goes on beside what follows"
    copied.set()
    stage.end_copy_out(1)
    assert slept[2:] == [(False, 0.03)], "D waits for its end"
    copied.clear()
    stage.begin_copy_in(1)
    stage.backward_input(0, None)
    copied.set()
    stage.backward_input(1, None)
    # B of the other one runs beside the copy, and its own B behind it
    assert slept[3:] == [(True, 0.012), (False, 0.03), (True, 0.012)]
