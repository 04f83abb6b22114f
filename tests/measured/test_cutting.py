"""What it takes to cut an output layer over all ranks, besides its products with the weight."""

from __future__ import annotations

from argparse import Namespace
from itertools import pairwise

import pytest
from measured_runs import HEAVY, LAYER, profile

from megatron_zb.measured.balance import Ends, costs_beside
from megatron_zb.measured.cutting import Cutting
from megatron_zb.measured.fit import Fit
from megatron_zb.schedules.placement import v_shape


def sizes(tensor: int) -> Namespace:
    return Namespace(hidden_size=1000, tensor_model_parallel_size=tensor)


def test_sums_by_hand() -> None:
    """A layer of 1e8 operations a token and a vocabulary of 50000 rows."""
    found = Cutting.of_sizes(sizes(1), 1e8, 50_000)
    assert found == Cutting(adding=36 * 1000 * 200 / 1e8, traffic=20 * 50_000 * 200 / 1e8)
    shared = Cutting.of_sizes(sizes(4), 1e8, 50_000)
    # each of four ranks has a quarter of the operations, and receives three quarters of the tokens
    assert shared.gathering == pytest.approx((2 * 1000 * 3 / 4) * 2000 / (1e8 / 4))
    assert (shared.adding, shared.traffic) == (found.adding, found.traffic)


def test_counted_costs_have_the_output_layer_on_all_ranks_or_on_the_last_stage() -> None:
    ends = Ends(0.5, 3.0, "by hand", cutting=Cutting(adding=0.1, gathering=0.2, traffic=0.4))
    placement, layers = v_shape(4), (2,) * 8
    whole = costs_beside(placement, layers, ends, cut=False)
    cut = costs_beside(placement, layers, ends, cut=True)
    layer = 4 / 16
    assert whole.vocabulary is None
    assert whole.forward[-1] == pytest.approx(5 * layer)
    assert cut.forward[-1] == pytest.approx(2 * layer)
    assert cut.forward[1:-1] == whole.forward[1:-1]
    assert whole.forward[0] == pytest.approx(2.5 * layer)
    assert cut.forward[0] == pytest.approx(2 * layer)
    assert cut.p2p == whole.p2p
    found = cut.vocabulary
    assert found is not None
    assert found.output == pytest.approx((2 * 3 + 0.2 + 4 * 3 * 0.2) * layer)
    assert found.weight == pytest.approx((3 + 0.2 + 4 * 0.2) * layer)
    assert found.loss == pytest.approx(4 * 0.1 * layer)
    # E and G of four ranks: half of what the embedding takes in F, B and W
    assert found.lookup == pytest.approx(4 * (0.2 + 0.5 * 3 / 2) * layer)


def test_measured_costs_take_the_output_layer_off_the_last_stage() -> None:
    fit, placement = Fit.of(profile()), v_shape(4)
    whole = fit.costs(placement, (2,) * 8)
    cut = fit.cut_costs(placement, (2,) * 8, Cutting(adding=0.25))
    assert whole.forward[-1] - cut.forward[-1] == pytest.approx(HEAVY * LAYER["forward"])
    assert all(a == b for a, b in pairwise(cut.weight))
    found = cut.vocabulary
    assert found is not None
    assert found.output == pytest.approx(HEAVY * (LAYER["forward"] + LAYER["backward"]))
    assert found.weight == pytest.approx(HEAVY * LAYER["weight"])
    assert found.loss == pytest.approx(4 * 0.25 * LAYER["forward"])
    assert found.held == pytest.approx(100 * HEAVY)


def test_a_profile_of_other_ranks_gives_way_to_the_sizes() -> None:
    ends = Ends(0.0, HEAVY, "by hand", profile())
    same = costs_beside(v_shape(4), (2,) * 8, ends, cut=True)
    other = costs_beside(v_shape(2), (4,) * 4, ends, cut=True)
    assert same.forward[0] == pytest.approx(2 * LAYER["forward"])
    assert other.forward[0] == pytest.approx(4 * 2 / 16)
