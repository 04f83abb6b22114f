"""What takes the place of functions of Megatron-LM's training loop."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel
from megatron_arguments import parsed

from megatron_zb.errors import UsageError
from megatron_zb.megatron_lm import models
from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.megatron_lm.hooks import ScheduledRun, name_place


def run_of(schedule: str) -> ScheduledRun:
    rendezvous: Any = None
    args = parsed(f"--pipeline-schedule {schedule}")
    return ScheduledRun(adapter_of(args), rendezvous, args)


def without_chunks(config: Any, pre_process: bool = True, post_process: bool = True) -> None:
    """A model provider in the way of pretrain_vlm.py."""


def with_chunks(config: Any, pre_process: bool, vp_stage: int | None = None) -> None:
    """One in the way of pretrain_gpt.py."""


def test_a_model_provider_that_knows_no_chunks_is_refused_where_there_are_some() -> None:
    with pytest.raises(UsageError, match=r"v-half has 2 chunks .* takes no vp_stage"):
        run_of("v-half")._check_builder(partial(without_chunks, None))
    run_of("zb-h1")._check_builder(without_chunks)
    for provider in (partial(with_chunks, None), lambda **keywords: None):
        run_of("v-half")._check_builder(provider)


class LanguageModelOfATest(GPTModel):
    """A class of a user's, which remembers what it was built with."""

    def __init__(self, config: Any, vp_stage: int | None = None, size: int = 1) -> None:
        self.__dict__["built_with"] = (
            vp_stage,
            size,
        )  # a module takes no attributes before its own


def test_a_language_model_learns_its_chunk_where_it_is_left_out() -> None:
    several = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    encoder = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
    build, found = LanguageModelOfATest, []
    with models.naming_chunk(1):
        found += [build(several), build(several, None, 3), build(several, 0), build(encoder)]
    with models.naming_chunk(None):
        found.append(build(several))
    found.append(build(several, size=2))
    expected = [(1, 1), (1, 3), (0, 1), (None, 1), (None, 1), (None, 2)]
    assert [model.built_with for model in found] == expected


@pytest.mark.parametrize(("pipeline_size", "expected"), [(1, 3), (4, 2)])
def test_an_encoder_has_all_of_its_layers(pipeline_size: int, expected: int) -> None:
    config = SimpleNamespace(num_layers=3, pipeline_model_parallel_size=pipeline_size)
    assert run_of("zb-h1").num_layers_to_build(lambda config, vp_stage: 2, config, 0) == expected


def test_the_first_chunk_that_is_refused_is_the_one_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_of("v-half")
    first, second = UsageError("the first"), UsageError("the second")
    refusals = iter([first, second])

    def refuse(*_: Any) -> None:
        raise next(refusals)

    monkeypatch.setattr(models, "check_model", refuse)
    run._failure = None
    for _ in range(2):
        run._check_model(None)
    assert run._failure is first


def test_the_place_of_a_chunk_may_be_passed_in_order() -> None:
    """As mcore-bridge does, so that the schedule's place is not given twice."""

    def build(config: Any, pre_process: bool = True, post_process: bool = True) -> None:
        pass

    place: dict[str, Any] = {"vp_stage": 1}
    assert name_place(build, ("config", False, True), place) == ("config",)
    assert place == {"pre_process": False, "post_process": True, "vp_stage": 1}
    assert name_place(lambda *args, **keywords: None, ("config",), {}) == ("config",)
    assert name_place(build, (), place) == ()
