"""A rank with both ends of a model reads each microbatch once, if both would read the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_zb.megatron_core.data_iterators import SharedReadings, TwiceRead


class _Data:
    """Microbatches counted from a number, and how many have been read."""

    def __init__(self, start: int = 0, length: int = 100) -> None:
        self.numbers = iter(range(start, start + length))
        self.count = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        number = next(self.numbers)
        self.count += 1
        return {"tokens": torch.tensor([number]), "name": str(number), "none": None}

    def rewind(self) -> str:
        return "rewound"


def _numbers(view: Any, count: int) -> list[int]:
    return [int(next(view)["tokens"]) for _ in range(count)]


def test_equal_data_is_read_once_over_several_steps() -> None:
    first, middle, last = _Data(), _Data(), _Data()
    readings = SharedReadings()
    for step in range(3):
        views = readings.shared([first, middle, last], 0, 2)
        assert views[1] is middle
        wanted = list(range(4 * step, 4 * step + 4))
        assert _numbers(views[0], 3) == wanted[:3]
        assert _numbers(views[2], 4) == wanted  # here the last stage is ahead by the end
        assert _numbers(views[0], 1) == wanted[3:]
    assert (first.count, middle.count, last.count) == (12, 0, 1)


def test_other_data_is_read_by_each() -> None:
    first, last = _Data(), _Data(start=50)
    views = SharedReadings().shared([first, last], 0, 1)
    assert _numbers(views[1], 2) == [50, 51]
    assert _numbers(views[0], 3) == [0, 1, 2]
    assert (first.count, last.count) == (3, 2)


def test_what_one_end_takes_out_is_still_there_for_the_other() -> None:
    views = SharedReadings().shared([_Data(), _Data()], 0, 1)
    for _ in range(2):
        next(views[0]).pop("tokens")
        assert "tokens" in next(views[1])


def test_training_and_evaluation_are_read_apart() -> None:
    readings = SharedReadings()
    training, evaluation = [_Data(), _Data()], [_Data(start=7), _Data(start=7)]
    for step in range(2):
        assert _numbers(readings.shared(training, 0, 1)[0], 1) == [step]
        views = readings.shared(evaluation, 0, 1)
        assert _numbers(views[0], 1) == _numbers(views[1], 1) == [7 + step]
        assert _numbers(readings.shared(training, 0, 1)[1], 1) == [step]


def test_the_end_of_the_data_is_the_end_for_both() -> None:
    views = SharedReadings().shared([_Data(length=2), _Data(length=2)], 0, 1)
    for view in views:
        assert _numbers(view, 2) == [0, 1]
    for view in views:
        with pytest.raises(StopIteration):
            next(view)


def test_other_questions_go_to_the_iterator_of_the_end() -> None:
    view = SharedReadings().shared([_Data(), _Data()], 0, 1)[0]
    assert view.rewind() == "rewound"
    assert iter(view) is view


def test_one_iterator_of_both_ends_none_and_saved_states_are_left_alone() -> None:
    one, other = _Data(), _Data()
    other.save_state = lambda: None  # type: ignore[attr-defined]
    for iterators in ([one, one], [None, one], [one, other]):
        assert SharedReadings().shared(iterators, 0, 1) is iterators


def test_two_models_read_once_each_at_its_own_pace() -> None:
    """The second one passes some microbatches, and may begin first; a step ends for both."""
    data, readings = _Data(), TwiceRead()
    for step in range(3):
        begin = 5 * step
        given: Any = SimpleNamespace(data_iterators=[data, "other"])
        readings.share(given, [1, 3])
        first, other, second = given.data_iterators
        assert other == "other"
        if step == 1:
            assert _numbers(second, 1) == [begin + 1]
            assert _numbers(first, 5) == list(range(begin, begin + 5))
            assert _numbers(second, 1) == [begin + 3]
        elif step == 0:
            assert _numbers(first, 2) == [begin, begin + 1]
            assert _numbers(second, 2) == [begin + 1, begin + 3]
            assert _numbers(first, 3) == [begin + 2, begin + 3, begin + 4]
        else:  # a stage that needs no data
            assert _numbers(second, 2) == [begin + 1, begin + 3]
        assert first.rewind() == second.rewind() == "rewound"
        readings.finish(5)
        assert data.count == begin + 5


def test_a_microbatch_that_one_model_changes_is_whole_for_the_other() -> None:
    given: Any = SimpleNamespace(data_iterators=[_Data()])
    TwiceRead().share(given, None)
    first, second = given.data_iterators
    next(first).clear()
    assert _numbers(second, 1) == [0]


def test_a_rank_that_is_sent_its_data_has_nothing_to_share() -> None:
    given: Any = SimpleNamespace(data_iterators=[None])
    readings = TwiceRead()
    readings.share(given, None)
    readings.finish(4)
    assert given.data_iterators == [None, None]
