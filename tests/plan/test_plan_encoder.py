"""Plans of a model with a vision encoder on its first stage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml
from small_models import load, small

from megatron_zb.cli import main as cli
from megatron_zb.errors import UsageError
from megatron_zb.measured import config
from megatron_zb.plan.byte_counts import WEIGHT, ActivationBytes, layer_held
from megatron_zb.plan.encoder import CountedEncoder
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.operators import model_flops
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.work import PassSeconds
from megatron_zb.schedules.placement import Placement

LIKE_THE_LAYERS = {
    "layers": 3,
    "hidden_size": 1024,
    "attention_heads": 16,
    "ffn_hidden_size": 4096,
    "patches": 1024,
}
QWEN3_VL = {
    "layers": 27,
    "hidden_size": 1152,
    "attention_heads": 16,
    "ffn_hidden_size": 4304,
    "patches": 1024,
    "mergers": 4,
}
QWEN25_VL = {
    "layers": 32,
    "hidden_size": 1280,
    "attention_heads": 16,
    "ffn_hidden_size": 3420,
    "gated_mlp": True,
    "patches": 1024,
}


def seeing(**changes: Any) -> ModelConfig:
    return small(encoder={**LIKE_THE_LAYERS, **changes})


def counted(**changes: Any) -> CountedEncoder:
    return CountedEncoder(load(seeing(**changes)))


@pytest.mark.parametrize(
    ("encoder", "width", "parameters"),
    [(QWEN3_VL, 2048, 538_631_408), (QWEN25_VL, 3584, 676_550_144)],
)
def test_an_encoder_has_the_weights_of_transformers_class(
    encoder: dict[str, Any], width: int, parameters: int
) -> None:
    model = small(hidden_size=width, encoder=encoder)
    assert CountedEncoder(load(model)).states.weights == pytest.approx(
        WEIGHT * parameters, rel=0.01
    )


def test_layers_of_an_encoder_cost_what_layers_cost_and_the_masked_scores() -> None:
    whole = load(small())
    wide = 4 * 1024
    merging = replace(whole, sequence=256).products(wide * (wide + 1024))
    layer = whole.layer(0) + whole.scores(0)
    work = counted().work
    assert work.forward == pytest.approx((layer * 3 + merging).forward)
    assert work.backward == pytest.approx((layer * 3 + merging).backward)
    assert work.weight == pytest.approx((layer * 3 + merging).weight)


def test_an_encoder_holds_its_layers_and_what_its_products_read() -> None:
    encoder = counted()
    layers = 3 * layer_held(load(small()), 0).activation
    read = 3 * 4 * 1024 + 1024  # of each merged patch: the input, both sides of GELU, the output
    assert encoder.held.activation - layers == pytest.approx(2 * read * 256)


def test_images_multiply_work_and_memory_but_not_the_states() -> None:
    one, two, four = counted(), counted(images=2), counted(images=4)
    more = two.work.total - one.work.total  # without the overhead of kernels
    assert four.work.total - two.work.total == pytest.approx(2 * more)
    assert one.work.total > more > 0.5 * one.work.total
    assert four.held.activation == pytest.approx(4 * one.held.activation)
    assert four.states == one.states
    assert four.flops(2) == pytest.approx(4 * one.flops(2))
    of_layers = model_flops(small(layers=3, vocabulary=1), 1024, 1024, all_scores=True)
    merging = 6 * 256 * 4096 * 5120
    assert one.flops(1) == pytest.approx(of_layers + merging, rel=1e-4)


def test_context_parallel_ranks_and_slices_encode_whole_images() -> None:
    whole = counted()
    cut = CountedEncoder(replace(whole.load, strategy=replace(whole.load.strategy, context=2)))
    assert cut.work == whole.work
    assert cut.held == whole.held


def test_a_frozen_encoder_runs_forward_and_holds_its_weights() -> None:
    trained, frozen = counted(), counted(frozen=True)
    assert frozen.work == PassSeconds(trained.work.forward)
    assert frozen.held == ActivationBytes()
    assert frozen.states.weights == frozen.states.total == trained.states.weights
    assert trained.states.total > 3 * trained.states.weights
    assert frozen.flops(8) == pytest.approx(trained.flops(8) / 3)
    adapters = CountedEncoder(replace(trained.load, frozen=True))
    assert (adapters.work, adapters.held) == (frozen.work, frozen.held)


def test_the_first_stage_has_the_encoder() -> None:
    plain, model = load(small()), load(seeing())
    placement = Placement("looped", 4, (0, 1, 2, 3))
    without, having = (StageWorkload(of, placement, (2, 2, 2, 2)) for of in (plain, model))
    encoder = CountedEncoder(model)
    assert having.work[0] == without.work[0] + encoder.work
    assert having.work[1:] == without.work[1:]
    assert having.held[0] == without.held[0] + encoder.held
    assert having.states[0] == without.states[0] + encoder.states
    assert having.states[1:] == without.states[1:]
    assert (
        having.held[0].activation > without.held[0].activation + 3 * layer_held(plain, 0).activation
    )


def test_a_plan_has_fewer_layers_beside_the_encoder(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--gpus 4 --device a100_80gb_sxm --pipeline 4 --schedules zb-h1 --micro-batch-size 2"
    for model in (small(layers=16), small(layers=16, encoder=LIKE_THE_LAYERS)):
        path = tmp_path / "model.yaml"
        fields = {key: value for key, value in model.model_dump().items() if value is not None}
        path.write_text(yaml.safe_dump(fields))
        assert cli.main(["plan", "--config", str(path), *words.split()]) == 0
    printed = capsys.readouterr().out
    assert "--pipeline-model-parallel-layout 'Et|" in printed or "'Ett|" in printed


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"patches": 1023}, "patches 1023 cannot be divided by 4; give a multiple of it"),
        ({"hidden_size": 1000}, "hidden_size 1000 cannot be divided by 16"),
        ({"images": 5}, "the images of encoder are 1280 tokens, more than sequence_length 1024"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused(changes: dict[str, int], sentence: str) -> None:
    fields = small().model_dump() | {"encoder": {**LIKE_THE_LAYERS, **changes}}
    text = yaml.safe_dump({key: value for key, value in fields.items() if value is not None})
    with pytest.raises(UsageError, match=sentence):
        config.parse(text.encode(), "model.yaml", ModelConfig)
