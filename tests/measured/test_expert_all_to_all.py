"""What pairs hide, derived from what pairs and single passes take."""

from __future__ import annotations

from typing import Any

import pytest
from measured_runs import LAYER, profile

from megatron_zb.measured.expert_all_to_all import with_all_to_all
from megatron_zb.measured.profile import PairProfile, Profile, merged_pairs
from megatron_zb.schedules import Costs
from megatron_zb.schedules.passes import Pair, Pass, PassKind
from megatron_zb.schedules.placement import v_shape

HIDDEN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2)  # of the stages of a V on four ranks
ALONE = 2 * (LAYER["forward"] + LAYER["backward"])


def pair(forward: int, backward: int, seconds: float, whole: bool = False) -> dict[str, Any]:
    return {"forward": forward, "backward": backward, "whole": whole, "seconds": seconds}


def with_pairs(pairs: list[dict[str, Any]]) -> Profile:
    values = profile(output=0.0).model_dump()
    return Profile.model_validate({**values, "pairs": pairs})


def every_pair() -> list[dict[str, Any]]:
    """Of all stages of a rank, as those on the other end have it."""
    return [
        pair(f, b, ALONE - HIDDEN[f] - HIDDEN[b] + (2 * LAYER["weight"] if whole else 0.0), whole)
        for f in range(8)
        for b in (f, 7 - f)
        for whole in (False, True)
    ]


def test_a_pair_is_as_much_shorter_as_both_of_its_stages_exchange() -> None:
    measured = with_pairs(every_pair())
    found = measured.all_to_all
    assert found is not None
    assert found.seconds == pytest.approx(HIDDEN)
    assert found.loss == pytest.approx(0.0)
    costs = measured.costs(v_shape(4)).for_placement(v_shape(4))
    assert costs.seconds[PassKind.F] == pytest.approx([stage.forward for stage in measured.stages])
    assert costs.seconds[PassKind.B] == pytest.approx([stage.backward for stage in measured.stages])
    for one in measured.pairs:
        kind = PassKind.BW if one.whole else PassKind.B
        both = Pair(Pass(PassKind.F, one.forward, 1), Pass(kind, one.backward, 0))
        assert costs.pair_seconds(both) == pytest.approx(one.seconds)


def test_what_one_pair_hides_counts_half_for_each_stage_and_elsewhere_as_usual() -> None:
    found = with_pairs([pair(0, 7, ALONE - 0.6)]).all_to_all
    assert found is not None
    assert found.seconds == pytest.approx([0.3] * 8)


def test_a_stage_that_exchanges_nothing_hides_nothing() -> None:
    pairs = [pair(f, b, ALONE - 0.5 * ((f == 7) + (b == 7))) for f in (0, 7) for b in (0, 7)]
    found = with_pairs(pairs).all_to_all
    assert found is not None
    assert found.seconds[0] == pytest.approx(0.0, abs=1e-9)
    assert found.seconds[7] == pytest.approx(0.5)


def test_pairs_that_take_longer_than_their_passes_have_a_loss() -> None:
    found = with_pairs([pair(0, 0, 1.1 * ALONE), pair(0, 7, 1.1 * ALONE)]).all_to_all
    assert found is not None
    assert found.seconds == pytest.approx([0.0] * 8)
    assert found.loss == pytest.approx(0.1)


def test_no_pass_is_all_exchange() -> None:
    """As a clock may have it that was disturbed: what is left of F and B is still positive."""
    values = with_pairs([pair(0, 0, 0.01)]).model_dump()
    for stage in values["stages"]:
        stage["backward"] = 0.5 * stage["forward"]
    costs = Profile.model_validate(values).costs(v_shape(4))
    assert min(*costs.seconds[PassKind.F], *costs.seconds[PassKind.B]) > 0


def test_without_pairs_nothing_is_told() -> None:
    measured = profile()
    assert measured.all_to_all is None
    assert not measured.costs(v_shape(4)).features


def test_equal_costs_take_the_share_that_was_measured() -> None:
    measured = with_pairs([pair(0, 0, ALONE - 1.0)])
    assert measured.all_to_all is not None
    share = measured.all_to_all.share
    assert share == pytest.approx(0.5 / 1.5)
    equal = Costs.uniform(pipeline_size=4, forward=1.0, backward=1.0, weight=1.0)
    table = with_all_to_all(equal, share, 0.0).for_placement(v_shape(4))
    assert table.exchange[PassKind.F] == pytest.approx([share / 2] * 8)


def test_replicas_count_as_their_slowest_pair() -> None:
    fast, slow, other = (
        PairProfile(**pair(0, 7, seconds, whole))
        for seconds, whole in ((1.0, True), (2.0, True), (3.0, False))
    )
    assert merged_pairs([[fast, other], [slow]]) == [other, slow]
