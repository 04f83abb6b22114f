"""Models with an encoder on their first stage: which run, and what becomes of all others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpt_cases import GPTCase, built, differences, run
from ranks import RankPools
from torch import nn

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_lm.models import check_model
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.schedules.placement import looped

IMAGES = GPTCase(images=(1, 0, 0, 0), wrapped=False)


class UsersModel(nn.Module):
    """A model of a user around Megatron's GPT, with the encoder where ``encodes`` says so."""

    def __init__(self, chunk: Any, encodes: bool) -> None:
        super().__init__()
        self.language_model = chunk
        self.pre_process, self.post_process = chunk.pre_process, chunk.post_process
        if encodes:
            self.encoder = nn.Linear(4, 32)


def refusal(chunk: Any, in_a_v: bool = False, draws_by_layer: bool = False) -> str:
    try:
        check_model(chunk, "zb-h1", in_a_v, draws_by_layer)
    except UsageError as error:
        return str(error)
    return ""


def refusals_of_models() -> dict[str, str]:
    """What a rank says of its chunk, for several models."""
    found = {}
    with built(GPTCase(wrapped=False), "zb-h1", num_microbatches=2) as (_, chunks):
        (chunk,) = chunks
        found["user's"] = refusal(UsersModel(chunk, encodes=chunk.pre_process), in_a_v=True)
        found["everywhere"] = refusal(UsersModel(chunk, encodes=True))
        ends = UsersModel(chunk, encodes=False)
        del ends.post_process
        found["no ends"] = refusal(ends)
        ends.language_model = nn.Linear(1, 1)
        found["unknown"] = refusal(ends)
    with built(IMAGES, "zb-h1", num_microbatches=2) as (_, chunks):
        (chunk,) = chunks
        found["LLaVA"] = refusal(chunk, in_a_v=True)
        found["streams"] = refusal(chunk, draws_by_layer=True)
        if chunk.pre_process:
            chunk.vision_model.decoder.layers = chunk.vision_model.decoder.layers[:1]
        found["cut"] = refusal(chunk)
    return found


def test_a_model_is_refused_if_its_encoder_is_not_in_the_first_stage(ranks: RankPools) -> None:
    first, last = ranks(2).run(refusals_of_models)
    for name in ("user's", "LLaVA"):
        assert first[name] == last[name] == ""
    assert first["everywhere"] == ""
    assert "cannot run a UsersModel: a stage other than the first has weights" in last["everywhere"]
    assert "vision_model.decoder has 1 of its 3 layers" in first["cut"]
    assert last["cut"] == ""
    for found in (first, last):
        assert "does not say by pre_process and post_process" in found["no ends"]
        assert "it runs GPTModel" in found["unknown"]
        assert "--pipeline-random-streams rank" in found["streams"]


def gradient_of_an_encoder(images: tuple[int, ...]) -> float | None:
    """The largest gradient of its first weight, None on a rank that has no encoder."""
    outcome = run(GPTCase(images=images), "v-half", [2])[2]
    found = outcome.gradients.get("vision_model.conv1.weight")
    return None if found is None else found.abs().max().item()


def test_images_reach_the_encoder_where_a_v_begins(ranks: RankPools) -> None:
    nothing, some = ranks(2).run(gradient_of_an_encoder, images=(1, 0))
    assert nothing is None
    assert some > 0
    assert ranks(2).run(gradient_of_an_encoder, images=(0,)) == [None, 0.0]


@pytest.mark.full
@pytest.mark.parametrize("name", ["zb-h1", "v-half", "v-zb", "interleaved", "wave", "auto"])
@pytest.mark.parametrize("frozen", [None, "vision_model", "language_model", "model"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_models_with_images_equal_megatrons(
    ranks: RankPools, world_size: int, frozen: str | None, name: str
) -> None:
    case = GPTCase(images=(1, 0, 0, 0, 2, 1, 0, 1, 3, 0), frozen=frozen)
    found = ranks(world_size).run(differences, case=case, schedule=name, num_microbatches=[5, 3])
    assert found == [[]] * world_size


def test_a_stage_that_returns_several_tensors_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [torch.zeros(1), torch.zeros(1)]
    monkeypatch.setattr(
        "megatron_zb.megatron_core.stages.megatron_schedules.forward_step",
        lambda *arguments, **keywords: (several, 0),
    )
    step: Any = SimpleNamespace(
        **dict.fromkeys(("memory", "forward_step_func", "config", "first_val_step")),
        physical=PhysicalPlacement(looped(2)),
        pp_rank=0,
        pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        data_iterators=[None],
        model=[None],
        num_microbatches=1,
        forward_only=True,
        forward_data_store=[],
        collect_non_loss_data=False,
    )
    stage = MegatronStage(step, 0, SplitBackward(WeightGradQueue()))
    with pytest.raises(UsageError, match=r"returned a list: .* one tensor from stage to stage"):
        stage.forward(0, None)
