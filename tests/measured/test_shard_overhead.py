"""What it takes to sharded an output layer over all ranks, besides its products with the weight."""

from __future__ import annotations

from itertools import pairwise

import pytest
from measured_runs import HEAVY, LAYER, LOSS, SHARD, profile, sharded_profile

from megatron_zb.measured.balance import Ends, costs_beside
from megatron_zb.measured.fit import Fit
from megatron_zb.measured.profile import Profile
from megatron_zb.measured.usual_gpu import ShardOverhead
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.placement import looped, v_shape


def test_sums_by_hand() -> None:
    """A layer of 1e8 operations a token and a vocabulary of 50000 rows."""
    found = ShardOverhead.of_sizes(1e8, 50_000, 1000, 1)
    assert found == ShardOverhead(adding=36 * 1000 * 200 / 1e8, traffic=20 * 50_000 * 200 / 1e8)
    shared = ShardOverhead.of_sizes(1e8, 50_000, 1000, 4)
    # each of four ranks has a quarter of the operations, and receives three quarters of the tokens
    assert shared.gathering == pytest.approx((2 * 1000 * 3 / 4) * 2000 / (1e8 / 4))
    assert (shared.adding, shared.traffic) == (found.adding, found.traffic)


def test_counted_costs_have_the_output_layer_on_all_ranks_or_on_the_last_stage() -> None:
    ends = Ends(
        0.5, 3.0, "by hand", shard_overhead=ShardOverhead(adding=0.1, gathering=0.2, traffic=0.4)
    )
    placement, layers = v_shape(4), (2,) * 8
    whole = costs_beside(placement, layers, ends, sharded=False)
    sharded = costs_beside(placement, layers, ends, sharded=True)
    layer = 4 / 16
    assert whole.feature(Vocabulary) is None
    assert whole.seconds[PassKind.F][-1] == pytest.approx(5 * layer)
    assert sharded.seconds[PassKind.F][-1] == pytest.approx(2 * layer)
    assert sharded.seconds[PassKind.F][1:-1] == whole.seconds[PassKind.F][1:-1]
    assert whole.seconds[PassKind.F][0] == pytest.approx(2.5 * layer)
    assert sharded.seconds[PassKind.F][0] == pytest.approx(2 * layer)
    assert sharded.p2p == whole.p2p
    found = sharded.feature(Vocabulary)
    assert found is not None
    assert found.output == pytest.approx((2 * 3 + 0.2 + 4 * 3 * 0.2) * layer)
    assert found.weight == pytest.approx((3 + 0.2 + 4 * 0.2) * layer)
    assert found.loss == pytest.approx(4 * 0.1 * layer)
    # E and G of four ranks: half of what the embedding takes in F, B and W
    assert found.lookup == pytest.approx(4 * (0.2 + 0.5 * 3 / 2) * layer)


def test_layers_of_multi_token_prediction_stay_on_the_last_stage() -> None:
    """Of a layer and 2 runs of 3 layers that are sharded; a profile has timed them, or has not."""
    placement, layers = v_shape(4), (2,) * 8
    sharded = costs_beside(placement, layers, Ends(0.0, 7.0, "by hand", kept=1.0), sharded=True)
    assert sharded.seconds[PassKind.F][-1] == pytest.approx(3 * 4 / 16)
    vocabulary = sharded.feature(Vocabulary)
    assert vocabulary is not None and vocabulary.predicts
    assert vocabulary.output == pytest.approx(2 * 6 * 4 / 16)
    usual = profile()
    predicting = usual.model_copy(
        update={
            "stages": [*usual.stages[:-1], usual.stages[-1].model_copy(update={"layers": "tm"})]
        }
    )
    fit, found = Fit.of(predicting), Fit.of(usual)
    assert fit.in_layers(sharded=True)[1] == pytest.approx(1.0)
    shared, whole = (of.sharded_costs(placement, layers, ShardOverhead()) for of in (fit, found))
    predicts = [it.predicts for of in (shared, whole) for it in [of.feature(Vocabulary)] if it]
    assert predicts == [True, False]


def test_measured_costs_take_the_output_layer_off_the_last_stage() -> None:
    fit, placement = Fit.of(profile()), v_shape(4)
    whole = fit.costs(placement, (2,) * 8)
    sharded = fit.sharded_costs(placement, (2,) * 8, ShardOverhead(adding=0.25))
    assert whole.seconds[PassKind.F][-1] - sharded.seconds[PassKind.F][-1] == pytest.approx(
        HEAVY * LAYER["forward"]
    )
    assert all(a == b for a, b in pairwise(sharded.seconds[PassKind.W]))
    found = sharded.feature(Vocabulary)
    assert found is not None
    assert found.output == pytest.approx(HEAVY * (LAYER["forward"] + LAYER["backward"]))
    assert found.weight == pytest.approx(HEAVY * LAYER["weight"])
    assert found.loss == pytest.approx(4 * 0.25 * LAYER["forward"])
    assert found.held == pytest.approx(100 * HEAVY)


@pytest.mark.parametrize("slow", [{}, {2: 1.5}], ids=["equal", "slow"])
def test_shards_that_were_measured_have_their_own_seconds(slow: dict[int, float]) -> None:
    """On a rank that is slow they are slow, too, whether the stages are those that ran or not."""
    measured, placement = sharded_profile(slow), v_shape(4)
    fit = Fit.of(measured)
    for costs in (
        measured.costs(placement),
        fit.sharded_costs(placement, (2,) * 8, ShardOverhead()),
    ):
        found = costs.for_placement(placement)
        times = [slow.get(rank, 1.0) for rank in range(4)]
        assert found.seconds[PassKind.O][8:] == pytest.approx([SHARD["output"] * t for t in times])
        assert found.seconds[PassKind.V][8:] == pytest.approx([SHARD["weight"] * t for t in times])
        assert found.seconds[PassKind.E][8:] == pytest.approx([0.025 * t for t in times])
        assert found.seconds[PassKind.P][-1] == pytest.approx(LOSS)
        assert found.memory["logits"][8:] == (SHARD["held"],) * 4
        expected = [2 * LAYER["forward"] * times[rank] for rank in placement.rank_of]
        assert found.seconds[PassKind.F] == pytest.approx(expected)
    looped_costs = fit.sharded_costs(looped(4), (4,) * 4, ShardOverhead()).for_placement(looped(4))
    assert looped_costs.seconds[PassKind.F] == pytest.approx(
        [4 * slow.get(rank, 1.0) for rank in range(4)]
    )


def test_whole_ends_are_the_sum_of_measured_shards() -> None:
    costs = Fit.of(sharded_profile()).costs(v_shape(4), (2,) * 8)
    assert costs.feature(Vocabulary) is None
    for kind, output, embedding in (
        (PassKind.F, 2 * SHARD["output"], SHARD["lookup"]),
        (PassKind.B, 2 * SHARD["output"], SHARD["gradient"]),
        (PassKind.W, 4 * SHARD["weight"], 0.0),
    ):
        seconds = costs.seconds[kind]
        assert seconds[-1] - seconds[1] == pytest.approx(output), kind
        assert seconds[0] - seconds[1] == pytest.approx(embedding), kind
    assert costs.memory["activation"][-1] - costs.memory["activation"][1] == 4 * SHARD["held"]


def test_a_measured_output_layer_tells_what_sharding_takes() -> None:
    """Its forward is 2 h V operations a token: a layer of a third of it has a third of them."""
    values = profile().model_dump()
    values["model"]["vocabulary"] = 4096
    found = Fit.of(Profile.model_validate(values)).shard_overhead
    assert found == ShardOverhead.of_sizes(2 * 64 * 4096 / HEAVY, 4096, 64, 1)
    assert Fit.of(profile()).shard_overhead is None  # of a file that does not tell the rows


def test_a_profile_of_other_ranks_gives_way_to_the_sizes() -> None:
    ends = Ends(0.0, HEAVY, "by hand", profile())
    same = costs_beside(v_shape(4), (2,) * 8, ends, sharded=True)
    other = costs_beside(v_shape(2), (4,) * 4, ends, sharded=True)
    assert same.seconds[PassKind.F][0] == pytest.approx(2 * LAYER["forward"])
    assert other.seconds[PassKind.F][0] == pytest.approx(4 * 2 / 16)
