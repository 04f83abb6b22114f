"""--pipeline-encoder: what Megatron-LM's arguments say of the encoder, and how a rank gets one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from brief_searches import briefly
from megatron_arguments import parsed
from torch import nn

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import ScheduleSettings
from megatron_zb.megatron_lm import spread_encoder
from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of
from megatron_zb.megatron_lm.spread_encoder import give_encoder
from megatron_zb.schedules.features.second_model import SecondModel

IMAGES = {"img_h": 28, "img_w": 28, "patch_dim": 14, "freeze_ViT": False}


def second_model(line: str, **more: Any) -> SecondModel:
    """The second model of the schedule that arguments choose."""
    with briefly():
        adapter = adapter_of(parsed(f"--pipeline-schedule v-half {line}", **more))
    assert adapter.second_model is not None
    return adapter.second_model


def test_a_share_is_that_of_the_language_models_forward() -> None:
    second = second_model("--pipeline-encoder 0.25")
    assert (second.forward, second.backward, second.copies) == (0.25, 0.5, True)


def test_on_counts_layers_and_tokens() -> None:
    """4 patches and a class token beside the text; attention counts a little."""
    sizes = parsed("")
    tokens, layers = sizes.seq_length, sizes.num_layers
    usual = second_model("--pipeline-encoder on", **IMAGES)
    assert isinstance(usual.forward, float)
    assert usual.forward == pytest.approx(5 / (tokens + 5), rel=0.2)
    assert usual.forward < 5 / (tokens + 5)
    deeper = second_model("--pipeline-encoder on", **IMAGES, encoder_num_layers=2 * layers)
    assert deeper.forward == pytest.approx(2 * usual.forward)
    larger = second_model("--pipeline-encoder on", **{**IMAGES, "img_h": 56})
    assert larger.forward == pytest.approx(9 / (tokens + 9), rel=0.2)


@pytest.mark.parametrize(
    "frozen",
    [
        {"freeze_ViT": True},
        {"freeze_vision_model": True},
        {"freeze_vision_model": True, "freeze_vision_projection": True},
    ],
)
def test_a_frozen_encoder_has_a_short_backward(frozen: dict[str, bool]) -> None:
    """Of further layers, too, which some models train beside a frozen projection."""
    second = second_model("--pipeline-encoder 0.5", **frozen)
    assert second.backward == pytest.approx(0.5 * 0.05)
    assert not second.is_frozen


def test_what_cannot_be_counted_is_asked_for() -> None:
    args = parsed("--pipeline-schedule v-half --pipeline-encoder on")
    with pytest.raises(UsageError, match=r"cannot be counted: give it, such as .*-encoder 0\.2"):
        adapter_of(args)


@pytest.mark.parametrize("value", ["fast", "0", "-1", "inf", "nan"])
def test_a_value_that_is_no_share_is_refused(
    value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"'{value}' is neither on, nor off, nor the share of a forward, such as 0.2"
    with pytest.raises(SystemExit):
        parsed(f"--pipeline-schedule v-half --pipeline-encoder {value}")
    assert words in capsys.readouterr().err
    with pytest.raises(UsageError) as error:
        ScheduleSettings(pipeline_schedule="v-half", pipeline_encoder=value)
    assert str(error.value) == f"pipeline_encoder: {words}"


def test_without_the_flag_there_is_no_second_model() -> None:
    args = parsed("--pipeline-schedule 1f1b --pipeline-encoder off")
    assert adapter_of(args).second_model is None


class Model(nn.Module):
    """A vision-language model as far as its encoder matters."""

    def __init__(self, *, pre_process: bool, post_process: bool) -> None:
        super().__init__()
        self.place = pre_process, post_process
        self.language_model = nn.Linear(1, 1)
        self.vision_model = nn.Linear(2, 2) if pre_process else None
        self.vision_projection = nn.Linear(2, 2) if pre_process else None
        self._drop_vision_class_token = pre_process


Model.__name__ = "LLaVAModel"


def test_a_rank_gets_the_encoder_of_a_first_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(restore=lambda: restored.append(True))
    restored: list[bool] = []
    monkeypatch.setattr(spread_encoder, "RandomState", lambda: state)
    monkeypatch.setattr(spread_encoder.models, "answering_ends", lambda place: nullcontext())
    built: list[Model] = []

    def build(**place: bool) -> Model:
        built.append(Model(**place))
        return built[-1]

    chunk = Model(pre_process=False, post_process=True)
    own = chunk.language_model
    give_encoder(chunk, build, (), {"pre_process": False, "post_process": True})
    (first,) = built
    assert first.place == (True, False)
    assert first.vision_model is first.vision_projection is None
    assert isinstance(chunk.vision_model, nn.Linear)
    assert chunk.language_model is own
    assert chunk._drop_vision_class_token is True
    assert restored == [True]
    names = {name.split(".")[0] for name, _ in chunk.named_parameters()}
    assert names == {"language_model", "vision_model", "vision_projection"}


def test_another_model_is_refused() -> None:
    chunk = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"encoder of a Linear cannot run on every rank, only"):
        give_encoder(chunk, torch.nn.Linear, (), {})
