"""What a profile makes of the measurements of all ranks."""

from __future__ import annotations

from megatron_zb.measured.profile import LinkProfile
from megatron_zb.megatron_core.profiling import Spans, by_one_clock, slowest_links
from megatron_zb.schedules.passes import Channel, Pass, PassKind


def test_a_link_is_as_fast_as_its_slowest_replica() -> None:
    there, back = Channel(0, 1), Channel(1, 0)
    found = slowest_links([{there: 2.0, back: 1.0}, {there: 3.0}, {there: 1.0, back: 4.0}])
    assert found == [
        LinkProfile(source=0, target=1, seconds=3.0),
        LinkProfile(source=1, target=0, seconds=4.0),
    ]


def test_all_ranks_are_told_by_the_clock_of_the_first() -> None:
    """The second clock is 10 s ahead of the first, the third 4 s behind the second."""
    f = Pass(PassKind.F, 0, 0)
    ranks: list[tuple[float, Spans]] = [
        (10.0, [(f, 1.0, 2.0)]),
        (-4.0, [(f, 12.0, 13.0)]),
        (0.0, [(f, 9.0, 10.0)]),
    ]
    assert by_one_clock(ranks) == [[(f, 1.0, 2.0)], [(f, 2.0, 3.0)], [(f, 3.0, 4.0)]]
