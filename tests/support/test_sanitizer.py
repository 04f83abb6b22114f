"""What the order of streams says of two uses of the same memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sanitizer.order import COMPUTE, Bytes, Order

WHOLE, HALF, OTHER_HALF = (Bytes(1, *span) for span in ((0, 8), (0, 4), (4, 8)))


@pytest.fixture
def order() -> Iterator[Order]:
    """A device with a storage of eight bytes."""
    order = Order()
    with order.tracking():
        order.hand_out(1, 8, lambda: False)
        yield order


def kinds(order: Order) -> list[str]:
    return [violation.kind for violation in order.violations]


def test_two_streams_that_wait_for_nothing_race(order: Order) -> None:
    side = order.new_stream("side")
    order.launch(COMPUTE, [], [WHOLE], "fill")
    order.launch(side, [WHOLE], [], "read")
    assert kinds(order) == ["race"]
    [violation] = order.violations
    assert violation.first.startswith("read on side in before")
    assert violation.second.startswith("fill on compute in before")


def test_an_event_orders_what_was_before_it_alone(order: Order) -> None:
    side = order.new_stream("side")
    order.launch(COMPUTE, [], [HALF], "fill")
    event = order.state(COMPUTE)
    order.launch(COMPUTE, [], [OTHER_HALF], "fill later")
    order.wait(side, event)
    order.launch(side, [HALF], [], "read")
    assert kinds(order) == []
    order.launch(side, [OTHER_HALF], [], "read")
    assert kinds(order) == ["race"]


def test_what_the_host_has_waited_for_is_before_all(order: Order) -> None:
    side = order.new_stream("side")
    order.launch(COMPUTE, [], [WHOLE], "fill")
    order.host_wait(order.state(COMPUTE), "synchronize")
    order.launch(side, [], [WHOLE], "fill")
    assert kinds(order) == []


def test_reads_do_not_race_and_a_write_races_with_each(order: Order) -> None:
    streams = [order.new_stream(name) for name in ("a", "b", "c")]
    order.wait_for_all("synchronize")
    for stream in streams[:2]:
        order.launch(stream, [WHOLE], [], f"read {stream}")
    assert kinds(order) == []
    order.launch(streams[2], [], [HALF], "write")
    assert kinds(order) == ["race", "race"]


def test_bytes_apart_are_apart(order: Order) -> None:
    side = order.new_stream("side")
    order.wait_for_all("synchronize")
    order.launch(COMPUTE, [], [HALF], "fill")
    order.launch(side, [], [OTHER_HALF], "fill")
    assert kinds(order) == []


def test_memory_is_not_handed_out_while_another_stream_uses_it(order: Order) -> None:
    side, is_gone = order.new_stream("side"), False
    order.hand_out(2, 8, lambda: is_gone)
    order.wait(side, order.state(COMPUTE))
    order.launch(side, [Bytes(2, 0, 8)], [], "read")
    is_gone = True
    order.hand_out(3, 8, lambda: False)
    assert kinds(order) == ["use after free"]


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_recorded_memory_is_handed_out_in_time(order: Order, is_waited_for: bool) -> None:
    side, is_gone = order.new_stream("side"), False
    order.hand_out(2, 8, lambda: is_gone)
    order.wait(side, order.state(COMPUTE))
    order.launch(side, [Bytes(2, 0, 8)], [], "read")
    if is_waited_for:
        order.wait(COMPUTE, order.state(side))
    else:
        order.record(2, side)
    is_gone = True
    order.hand_out(3, 8, lambda: False)
    assert kinds(order) == []


def test_host_waits_count_inside_passes_alone(order: Order) -> None:
    order.host_wait({}, "item")
    order.label = "F0"
    order.host_wait({}, "item")
    assert list(order.host_waits.values()) == [1]
    assert next(iter(order.host_waits)).startswith("item in test_host_waits_count")
