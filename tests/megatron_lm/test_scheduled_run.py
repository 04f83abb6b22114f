"""What takes the place of functions of Megatron-LM's training loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import transformer_block
from megatron_arguments import parsed

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm import models
from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.megatron_lm.hooks import ScheduledRun, name_place, read_for_stages


def run_of(schedule: str) -> ScheduledRun:
    rendezvous: Any = None
    args = parsed(f"--pipeline-schedule {schedule}")
    return ScheduledRun(adapter_of(args), rendezvous, args)


def test_a_builder_without_vp_stage_is_answered_for_its_chunk() -> None:
    config = SimpleNamespace(pipeline_model_parallel_size=2, num_layers=3)
    before = parallel_state.is_pipeline_first_stage, transformer_block.get_num_layers_to_build
    with models.answering({"pre_process": True, "post_process": False}):
        assert parallel_state.is_pipeline_first_stage()
        assert not parallel_state.is_pipeline_last_stage(ignore_virtual=False)
        with pytest.raises(UsageError, match=r"takes no vp_stage .* such as zb-h1"):
            transformer_block.get_num_layers_to_build(config)
    after = parallel_state.is_pipeline_first_stage, transformer_block.get_num_layers_to_build
    assert after == before


def test_a_builder_of_datasets_may_take_no_stage() -> None:
    def datasets(samples: int) -> int:
        return samples

    datasets.is_distributed = True  # type: ignore[attr-defined]

    def pretrain(config: Any, train_valid_test_dataset_provider: Any) -> Any:
        return train_valid_test_dataset_provider

    build = read_for_stages(pretrain, None, datasets)
    assert build(3, vp_stage=1) == 3
    assert build.is_distributed
    assert read_for_stages(pretrain, None, build) is build


def test_a_config_that_changes_while_chunks_are_built_is_refused() -> None:
    config = SimpleNamespace(activation_func_clamp_value=None, _vp_stage=0)
    chunk = SimpleNamespace(config=config)
    before = models.plain_settings(chunk)
    config._vp_stage = 1
    models.check_settings(chunk, before, "v-half")
    config.activation_func_clamp_value = 7.0
    with pytest.raises(UsageError, match=r"activation_func_clamp_value from None to 7\.0 .* zb-h1"):
        models.check_settings(chunk, before, "v-half")


def _init(self: Any, config: Any, vp_stage: int | None = None, size: int = 1) -> None:
    """Remember the arguments, before the module of torch can take attributes."""
    self.__dict__["built_with"] = (vp_stage, size)


@pytest.mark.parametrize("base", [GPTModel, *versions.hybrid_models()])
def test_a_language_model_learns_its_chunk_where_it_is_left_out(base: type[Any]) -> None:
    several = SimpleNamespace(virtual_pipeline_model_parallel_size=2)
    encoder = SimpleNamespace(virtual_pipeline_model_parallel_size=None)
    build: Any = type("LanguageModelOfATest", (base,), {"__init__": _init})
    found = []
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
