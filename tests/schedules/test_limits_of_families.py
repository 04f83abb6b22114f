"""What each family promises of its memory, under limits of the user, and what refusals name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.request import Limit
from megatron_zb.schedules.simulator import simulate

pytestmark = pytest.mark.usefixtures("brief_searches")

RANK = r"rank 0(?: \(Megatron's pipeline rank \d+\))?"
"""The rank that a refusal names; in a V, it has another number in Megatron."""

# The most microbatches of a whole rank that a rank holds, for p ranks and at least 2p microbatches.
PROMISES: dict[str, Callable[[int], float]] = {
    "1f1b": lambda p: p,
    "1f1b-v": lambda p: {2: 2, 4: 3}[p],
    "zb-h1": lambda p: p,
    "zb-h2": lambda p: 2 * p - 1,
    "zb-1p": lambda p: p,
    "zb-2p": lambda p: 2 * p,
    "v-zb": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
}
SEARCHED = ("zb-1p", "zb-2p", "v-zb", "v-half", "v-min")


NAMES = (
    "gpipe 1f1b interleaved 1f1b-v zb-h1 zb-h2 zb-1p zb-2p v-zb v-half v-min wave dualpipe-v auto"
)


def test_no_schedule_has_gone() -> None:
    """Most tests take their schedules from the catalog, and would go with one."""
    assert schedules.names() == NAMES.split()


def costs_of(p: int) -> Costs:
    return Costs.uniform(pipeline_size=p, forward=1.0, backward=1.25, weight=0.75, p2p=0.05)


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", PROMISES)
def test_without_a_limit_a_family_keeps_its_promise(name: str, p: int) -> None:
    schedule = schedules.build(name, pipeline_size=p, num_microbatches=3 * p, costs=costs_of(p))
    peak = max(simulate(schedule, costs_of(p)).peak_activation)
    assert peak <= PROMISES[name](p) + 1e-9
    if name not in SEARCHED:
        assert peak == PROMISES[name](p)


@pytest.mark.parametrize("fraction", [0.75, 1.0, 3.0])
@pytest.mark.parametrize("name", SEARCHED)
def test_a_limit_lowers_a_promise_and_never_lifts_it(name: str, fraction: float) -> None:
    """The limit is a share of 1F1B's p microbatches."""
    p = 4
    schedule = schedules.build(
        name, pipeline_size=p, num_microbatches=8, costs=costs_of(p), memory_limit=fraction
    )
    peak = max(simulate(schedule, costs_of(p)).peak_activation)
    assert peak <= min(PROMISES[name](p), fraction * p) + 1e-9


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-1p", "v-half", "v-min", "auto"])
def test_the_fraction_that_a_refusal_names_is_kept_and_less_is_refused(name: str) -> None:
    def build(limit: float) -> schedules.Schedule:
        return schedules.build(
            name, pipeline_size=4, num_microbatches=8, costs=costs_of(4), memory_limit=limit
        )

    with pytest.raises(UsageError) as refusal:
        build(0.01)
    named = re.search(
        r"limit of 0\.01 of 1F1B: .*needs at least ([\d.]+) of 1F1B", str(refusal.value)
    )
    assert named is not None, str(refusal.value)
    least = float(named[1])
    assert max(simulate(build(least), costs_of(4)).peak_activation) <= 4 * least + 1e-9
    with pytest.raises(UsageError, match="needs at least"):
        build(0.99 * least)


@pytest.mark.parametrize("name", ["1f1b", "zb-1p", "v-half"])
def test_the_bytes_that_a_refusal_names_are_those_of_the_rank_with_what_it_always_holds(
    name: str,
) -> None:
    """Activations of 1,000 bytes for a microbatch on a rank, and other states on each of them."""
    fixed = [5000.0, 100.0, 300.0, 200.0]
    costs = Costs.of_slices(
        pipeline_size=4,
        forward=[1.0] * 4,
        backward=[1.25] * 4,
        weight=[0.75] * 4,
        activation=[1000.0] * 4,
        fixed=fixed,
    )

    def build(limits: list[float]) -> schedules.Schedule:
        limit = Limit(bytes=tuple(limits))
        return schedules.build(
            name, pipeline_size=4, num_microbatches=8, costs=costs, memory_limit=limit
        )

    limits = [5001.0, 1e6, 1e6, 1e6]
    with pytest.raises(UsageError) as refusal:
        build(limits)
    said = str(refusal.value)
    named = re.search(rf"limit of 5001 bytes: {RANK} needs at least (\d+) bytes", said)
    assert named is not None, str(refusal.value)
    limits[0] = float(named[1])
    assert limits[0] >= 6000
    peaks = simulate(build(limits), costs).peak_memory
    assert all(peak + of <= most for peak, of, most in zip(peaks, fixed, limits, strict=True))
    with pytest.raises(UsageError, match=f"{RANK} needs at least"):
        build([limits[0] - 1, *limits[1:]])
