"""The parts of a step: their order, and what a stage is that several of them replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from ranks import RankPools

from megatron_zb.megatron_core import parts
from megatron_zb.megatron_core.connections import WatchPart
from megatron_zb.megatron_core.forward_backward import ForwardBackward
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.post_validation import PostValidationPart
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.runtime.channels import Channels
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.vocabulary import Vocabulary
from megatron_zb.schedules.passes import Channel
from megatron_zb.schedules.placement import looped

PHYSICAL = PhysicalPlacement(looped(2))


class Loud:
    """A stage with an option."""

    def __init__(self, *arguments: Any, word: str) -> None:
        super().__init__(*arguments)
        self.said = [word, *getattr(self, "said", [])]


class Numbered:
    """Another stage, which keeps what it is made of."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.said = arguments, ["numbered"]


class Replacing(StepPart):
    """Replaces the first stage."""

    def __init__(self, by: Callable[..., Any]) -> None:
        self._by = by

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        return self._by if number == 0 else None


def test_a_stage_that_two_parts_replace_is_of_both_types() -> None:
    step: Any = None
    one = ForwardBackward(PHYSICAL, lambda *_: step, [], [StepPart(), Replacing(Numbered)])
    assert one._type_of_stage(0, step) is Numbered
    assert one._type_of_stage(1, step) is MegatronStage
    parts = [Replacing(partial(Loud, word="loud")), Replacing(Numbered)]
    both = ForwardBackward(PHYSICAL, lambda *_: step, [], parts)
    made = both._type_of_stage(0, step)(1, 2)
    assert isinstance(made, Loud) and isinstance(made, Numbered)
    assert (made.arguments, made.said) == ((1, 2), ["loud", "numbered"])
    assert type(both._type_of_stage(0, step)(3)) is type(made)
    assert both._type_of_stage(1, step) is MegatronStage


@pytest.mark.parametrize("vocabulary_parallel", [True, False])
def test_a_part_takes_the_place_of_one_of_its_type(vocabulary_parallel: bool) -> None:
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    if vocabulary_parallel:
        costs = costs.having(Vocabulary(output=1.0, weight=1.0))
    current: Any = SimpleNamespace(costs=costs, slicing=None, second_model=None)
    found = parts.PartList(PHYSICAL, current)
    before = [type(part) for part in found.in_order()]
    assert found[WatchPart].timeout is None
    found.add(WatchPart(7.0))
    assert found[WatchPart].timeout == 7.0
    assert [type(part) for part in found.in_order()] == before
    assert (parts.VocabularyPart in found) is vocabulary_parallel


def kinds_of(part: type[StepPart]) -> set[type[StepPart]]:
    """All classes that derive from a part."""
    own = set(part.__subclasses__())
    return own.union(*map(kinds_of, own))


def test_every_part_has_a_place_in_the_order() -> None:
    """But that of post-validation, which is added behind all others when the optimizer is there."""
    known = {each for each in kinds_of(StepPart) if each.__module__.startswith("megatron_zb")}
    assert known - {PostValidationPart} == set(parts._ORDER)
    assert len(parts._ORDER) == len(set(parts._ORDER))
    costs = Costs.uniform(pipeline_size=2, forward=1.0, backward=1.0, weight=1.0)
    current: Any = SimpleNamespace(costs=costs, slicing=None, second_model=None)
    found = parts.PartList(PHYSICAL, current)
    found.add(StepPart())
    with pytest.raises(AssertionError, match=r"'StepPart'.: give each a place in _ORDER"):
        found.in_order()


class Logging(StepPart):
    """Notes the calls of its hooks."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def before_step(self, step: Step) -> None:
        self._log.append(f"before {self._name}")

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        self._log.append(f"enter {self._name}")
        yield
        self._log.append(f"leave {self._name}")

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        self._log.append(f"wrap {number} {self._name}")

    def after_step(self, step: Step) -> None:
        self._log.append(f"after {self._name}")

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def _calls() -> list[str]:
    """The calls of the hooks of two parts in a step, and when the channels are closed."""
    case, log = GPTCase(), list[str]()
    with built(case, "1f1b", 4) as (adapter, chunks):
        assert adapter is not None
        function = adapter.forward_backward_func
        for name in "ab":
            function.add(Logging(name, log))
        forward_backward(function, chunks, [microbatches(case, 4) for _ in chunks], 4)
    return log


def test_hooks_are_called_in_the_order_of_the_list_and_after_a_step_in_reverse(
    ranks: RankPools,
) -> None:
    for rank, log in enumerate(ranks(2).run(_calls)):
        assert log == [
            *("before a", "before b", "enter a", "enter b", f"wrap {rank} a", f"wrap {rank} b"),
            *("leave b", "leave a", "after b", "after a", "close b", "close a"),
        ]


def said_in_sends(case: GPTCase) -> set[str]:
    """What the watchdog would report where this rank waits for readers, which are all late."""
    said, isend = set[str](), Channels._isend
    with built(case, "v-half", 4) as (adapter, chunks):
        assert adapter is not None

        def late(self: Channels, channel: Channel, tensor: torch.Tensor) -> Any:
            work = isend(self, channel, tensor)

            def wait() -> None:
                said.add(adapter.part(WatchPart).progress.state().doing)
                work.wait()

            return SimpleNamespace(is_completed=lambda: False, wait=wait)

        with mock.patch.object(Channels, "_isend", late):
            data = [microbatches(case, 4) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, 4)
    return {doing for doing in said if "between two steps" not in doing}  # channels are connected


LENGTHS = GPTCase(lengths=(8, 16), options=(("moe_token_dispatcher_type", "alltoall"),))


@pytest.mark.parametrize("case", [GPTCase(), LENGTHS], ids=["", "lengths"])
def test_a_rank_that_waits_for_a_late_reader_says_so(ranks: RankPools, case: GPTCase) -> None:
    """Where messages have other lengths, it waits for the reader of a header, too."""
    for rank, said in enumerate(ranks(2).run(said_in_sends, case=case)):
        (doing,) = said
        assert doing.startswith("waits until pipeline rank ")
        assert doing.endswith(" takes what it has sent"), rank
