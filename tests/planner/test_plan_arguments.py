"""``plan -- ARGUMENTS`` plans what the arguments of a training describe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_zb.cli import main
from megatron_zb.errors import UsageError
from megatron_zb_plan import request
from megatron_zb_plan.model import ModelConfig, read_model
from megatron_zb_plan.model_flags import mock_data_flags, model_flags

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs/models").glob("*.yaml"))
DENSE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--global-batch-size 64 --padded-vocab-size 32000"
).split()
SPARSE = [*DENSE, "--num-experts", "8"]


def words_of(model: ModelConfig) -> list[str]:
    return [*model_flags(model), *mock_data_flags(model)]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_words_of_a_model_describe_it(path: Path) -> None:
    model = read_model(path)
    read, sizes = request.read_training(words_of(model))
    unsaid = dict.fromkeys(("name", "source", "recommended", "published", "tokenizer"))
    explicit = {"ffn_hidden_size": model.ffn}
    assert read.model_copy(update=unsaid) == model.model_copy(update={**unsaid, **explicit})
    assert sizes == {}


ONCE = ("llama3_8b", "qwen3_30b_a3b")
# Of one setting, in which each model fits: a search of many takes half a minute for some.
ONE_SETTING = (
    "--gpus 64 --device h100_sxm --gpu-memory 2000GiB --pipeline 4 --tensor 4 --micro-batch-size 1 "
    "--recompute none --schedules zb-h1 --vocabulary off --tries 1"
).split()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in ONCE else pytest.mark.full)
        for path in CONFIGS
    ],
)
def test_a_plan_of_arguments_equals_that_of_a_file(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["flags", "--config", path.stem, "--mock-data"]) == 0
    words = capsys.readouterr().out.split()
    plans = []
    for of in (["--config", path.stem], ["--", *words]):
        assert main.main(["plan", *ONE_SETTING, "--format", "json", *of]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        plans[-1].pop("model")
    assert plans[0]["ranked"]
    assert plans[0] == plans[1]


def test_given_sizes_are_kept_and_the_others_chosen() -> None:
    words = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --micro-batch-size 2"
    more = "--recompute-granularity full --fp8-format hybrid --expert-model-parallel-size 8"
    sizes = {"tensor": "1", "pipeline": "4", "micro_batch_size": "2"}
    assert request.read_training([*DENSE, *words.split()])[1] == sizes
    more_sizes = {"recompute": "full", "precision": "fp8", "expert": "8"}
    found = request.read_training([*SPARSE, *words.split(), *more.split()])[1]
    assert found == {**sizes, **more_sizes}
    assert request.read_training([*DENSE, "--recompute-activations"])[1] == {
        "recompute": "selective"
    }
    modules = "--recompute-granularity selective --recompute-modules moe_act layernorm".split()
    found = request.read_training([*SPARSE, *modules])[1]
    assert found == {"recompute": "moe_act+layernorm"}


@pytest.mark.parametrize(
    ("words", "dense"),
    [("1", 0), ("([0]*3+[1]*5)", 3), ("[0,0,1,1,1,1,1,1]", 2), ("([0]+[1]*7)", 1)],
)
def test_dense_layers_before_those_with_experts(words: str, dense: int) -> None:
    model, _ = request.read_training([*SPARSE, "--moe-layer-freq", words])
    assert model.experts is not None
    assert model.experts.dense_layers == dense


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (DENSE[2:], "--num-layers is missing"),
        (DENSE[:-2], "--padded-vocab-size"),
        ([*DENSE, "--experimental-attention-variant", "dsa"], "--experimental-attention-variant"),
        ([*DENSE, "--group-query-attention", "--num-query-groups", "3"], "query_groups"),
        ([*DENSE, "--nonsense"], "unknown argument '--nonsense'"),
        ([*SPARSE, "--moe-layer-freq", "2"], "--moe-layer-freq 2"),
        ([*SPARSE, "--moe-layer-freq", "([0]*3+[1]*4)"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "[1]*10**9"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "print(1)"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "(" * 500], "--moe-layer-freq"),
        ([*SPARSE, "--moe-router-topk", "9"], "top_k"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_sentence(words: list[str], named: str) -> None:
    with pytest.raises(UsageError) as raised:
        request.read_training(words)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (["--gpus", "8", "--config", "gpt_28b"], "leave one out"),
        (["--profile", "run.yaml"], "cannot be combined with --profile"),
        ([], "--gpus is missing"),
        (["--gpus", "8", "--student-config", "half_mlp"], "leave out --student-config"),
    ],
)
def test_two_descriptions_are_refused(
    before: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", *before, "--", *DENSE]) == 2
    assert named in capsys.readouterr().err
