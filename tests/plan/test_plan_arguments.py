"""``plan -- ARGUMENTS`` plans what the arguments of a training describe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.cli import main
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.plan import model_flags as model_flags_module
from megatron_zb.plan import request
from megatron_zb.plan.model import ModelConfig, read_model
from megatron_zb.plan.model_flags import mock_data_flags, model_flags

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs/models").glob("*.yaml"))
DENSE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--global-batch-size 64 --padded-vocab-size 32000"
).split()
SPARSE = [*DENSE, "--num-experts", "8"]


def words_of(model: ModelConfig) -> list[str]:
    return [*model_flags(model), *mock_data_flags(model)]


def described(path: Path) -> ModelConfig:
    """The model of a file, if the installed Megatron-LM has arguments for it."""
    model = read_model(path)
    if model.pattern is not None and versions.core_series() < (0, 17):
        pytest.skip("--hybrid-layer-pattern had another name in 0.16")
    return model


@pytest.mark.parametrize(
    ("segments", "words"),
    [
        (
            ["M", "*", "-"],
            "'M|\\*|-' has 3 stages, which --pipeline-model-parallel-size 2 does not",
        ),
        (["M", "", "*", "-"], "stage 1 of 0 to 3 has no layers: give it one"),
    ],
)
def test_stages_that_a_pattern_cannot_have(segments: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("|", r"\|")):
        request._check_segments(segments, 2)
    request._check_segments(["", "M", "*", ""], 2)


@pytest.mark.parametrize("text", ["-" * 100_000 + "1", "[0]" + "+[1]" * 20_000, "[" * 300, "0]"])
def test_a_list_that_is_none_or_too_deep_has_no_elements(text: str) -> None:
    assert model_flags_module._list_of(text) == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_words_of_a_model_describe_it(path: Path) -> None:
    model = described(path)
    training = request.read_training(words_of(model))
    unsaid = dict.fromkeys(("name", "source", "recommended", "published", "tokenizer"))
    explicit = {"ffn_hidden_size": model.ffn}
    assert training.model.model_copy(update=unsaid) == model.model_copy(
        update={**unsaid, **explicit}
    )
    assert training.sizes == {}


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
    described(path)
    assert main.main(["flags", "--config", path.stem, "--mock-data"]) == 0
    words = capsys.readouterr().out.split()
    plans = []
    for of in (["--config", path.stem], ["--", *words]):
        assert main.main(["plan", *ONE_SETTING, "--format", "json", *of]) == 0
        plans.append(json.loads(capsys.readouterr().out))
        plans[-1].pop("model")
    missing = "--micro-batch-size is missing among the arguments"
    assert plans[1].pop("why_not_given") == missing
    assert plans[0]["ranked"]
    assert plans[0] == plans[1]


def test_given_sizes_are_kept_and_the_others_chosen() -> None:
    words = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --micro-batch-size 2"
    more = "--recompute-granularity full --fp8-format hybrid --expert-model-parallel-size 8"
    sizes = {"tensor": "1", "pipeline": "4", "micro_batch_size": "2"}
    assert request.read_training([*DENSE, *words.split()]).sizes == sizes
    more_sizes = {"recompute": "full", "precision": "fp8", "expert": "8"}
    found = request.read_training([*SPARSE, *words.split(), *more.split()]).sizes
    assert found == {**sizes, **more_sizes}
    assert request.read_training([*DENSE, "--recompute-activations"]).sizes == {
        "recompute": "selective"
    }
    modules = "--recompute-granularity selective --recompute-modules moe_act layernorm".split()
    found = request.read_training([*SPARSE, *modules]).sizes
    assert found == {"recompute": "moe_act+layernorm"}


@pytest.mark.parametrize(
    ("words", "dense"),
    [("1", 0), ("([0]*3+[1]*5)", 3), ("[0,0,1,1,1,1,1,1]", 2), ("([0]+[1]*7)", 1)],
)
def test_dense_layers_before_those_with_experts(words: str, dense: int) -> None:
    model = request.read_training([*SPARSE, "--moe-layer-freq", words]).model
    assert model.experts is not None
    assert model.experts.dense_layers == dense


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (DENSE[2:], "--num-layers is missing"),
        (DENSE[:-2], "--padded-vocab-size"),
        ([*DENSE, "--experimental-attention-variant", "dsa"], "--experimental-attention-variant"),
        ([*DENSE, "--group-query-attention", "--num-query-groups", "3"], "--num-query-groups 3"),
        ([*DENSE, "--swiglu", "--squared-relu"], "--swiglu and --squared-relu exclude"),
        ([*DENSE, "--hidden-size", "0"], "--hidden-size: Input should be greater"),
        ([*DENSE, "--mtp-num-layers", "1"], "for example, --position-embedding-type rope"),
        ([*DENSE, "--nonsense"], "unknown argument '--nonsense'"),
        ([*SPARSE, "--moe-layer-freq", "2"], "--moe-layer-freq 2"),
        ([*SPARSE, "--moe-layer-freq", "([0]*3+[1]*4)"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "[1]*10**9"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "print(1)"], "--moe-layer-freq"),
        ([*SPARSE, "--moe-layer-freq", "(" * 500], "--moe-layer-freq"),
        ([*SPARSE, "--moe-router-topk", "9"], "--moe-router-topk is 9"),
        ([*SPARSE, "--moe-router-num-groups", "3"], "--moe-router-num-groups and --moe-router-g"),
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


PLANNED = ["--gpus", "8", "--schedules", "zb-h1", "--tries", "1", "--vocabulary", "off"]
RUN = (
    "--micro-batch-size 1 --pipeline-model-parallel-size 4 --overlap-grad-reduce "
    "--overlap-param-gather --attention-dropout 0 --hidden-dropout 0"
).split()


def plan_of(capsys: pytest.CaptureFixture[str], *words: str, more: tuple[str, ...] = ()) -> Any:
    code = main.main(["plan", *PLANNED, "--format", "json", *more, "--", *DENSE, *RUN, *words])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return json.loads(printed.out)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size 3 cannot be had for"),
        ("--pipeline-model-parallel-size 3", "--pipeline-model-parallel-size 3 cannot be had for"),
        ("--micro-batch-size 3", "--micro-batch-size 3 cannot be had for"),
        ("--micro-batch-size 0", "--micro-batch-size '0' is no list of sizes"),
        ("--context-parallel-size 3", "--context-parallel-size 3 cannot be had for"),
        ("--num-experts 8 --expert-model-parallel-size 3", "--expert-model-parallel-size 3 cannot"),
        ("--fp8-format hybrid", "--fp8-format: the description of A100"),
        (
            "--recompute-granularity selective --recompute-modules moe",
            "--recompute-modules moe: the",
        ),
        ("--recompute-granularity selective --recompute-modules x", "--recompute-modules 'x' is"),
        ("--pipeline-slices 64", "--pipeline-slices 64: no sample of 1024 tokens"),
    ],
)
def test_a_refusal_names_the_argument_of_the_training(
    words: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["plan", *PLANNED, "--", *DENSE, *RUN, *words.split()]) == 2
    assert f"megatron-zb: error: {named}" in capsys.readouterr().err


@pytest.mark.parametrize("modules", [[], ["--recompute-modules", "core_attn"]])
def test_selective_recomputation_is_planned_with_and_without_its_module(
    modules: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron's default module is core_attn; attention is fused, so that it saves nothing."""
    plain = plan_of(capsys)["given"]
    found = plan_of(capsys, "--recompute-granularity", "selective", *modules)["given"]
    assert found["recompute"] == (modules[1] if modules else "selective")
    assert found["seconds"] > plain["seconds"]


@pytest.mark.parametrize(
    ("words", "schedule", "chunks", "layout"),
    [
        ("", "Megatron 1F1B", None, "Ett|tt|tt|ttL"),
        ("--pipeline-model-parallel-size 1", "no pipeline", None, "EttttttttL"),
        ("--num-virtual-stages-per-pipeline-rank 2", "Megatron interleaved", 2, None),
        ("--num-layers-per-virtual-pipeline-stage 1", "Megatron interleaved", 2, None),
        ("--pipeline-model-parallel-layout Et|ttt|ttt|tL", "Megatron 1F1B", None, "Et|ttt|ttt|tL"),
        ("--pipeline-model-parallel-layout Et|(t|)*6tL", "Megatron interleaved", 2, None),
        (
            "--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3",
            "Megatron 1F1B",
            None,
            "Et|tt|tt|tttL",
        ),
        ("--pipeline-schedule v-half", "v-half", None, "Et|t|t|t|t|t|t|tL"),
    ],
)
def test_the_run_as_given_is_the_row_that_gains_are_relative_to(
    words: str,
    schedule: str,
    chunks: int | None,
    layout: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = plan_of(capsys, *words.split())
    given = found["given"]
    assert (given["schedule"], given["chunks"]) == (schedule, chunks)
    assert given["layout"] == (layout or "Et|t|t|t|t|t|t|tL")
    for row in found["ranked"]:
        speeds = [of["tokens_per_second_per_gpu"] for of in (row, given)]
        assert row["gain"] == pytest.approx(speeds[0] / speeds[1] - 1)
    assert given["reason"].startswith("as given; ")
    assert "the run as given" in found["recommendation"]


def test_the_run_as_given_is_first_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", *PLANNED, "--", *DENSE, *RUN, "--sequence-parallel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("# schedule"))
    assert "gain" in lines[head]
    assert lines[head + 1].startswith("= Megatron 1F1B")


def test_what_is_left_out_has_megatrons_default(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the flags of tensor parallelism the plan chooses a size; the run has 1."""
    given = plan_of(capsys)["given"]
    assert (given["tensor"], given["context"], given["data"]) == (1, 1, 2)
    assert given["recompute"] == "none"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--num-virtual-stages-per-pipeline-rank 3", "--num-layers 8 cannot be divided evenly"),
        ("--pipeline-model-parallel-layout Et|(t|)*4ttL", "--pipeline-model-parallel-layout has 6"),
        ("--num-layers-per-virtual-pipeline-stage 3", "--num-layers-per-virtual-pipeline-stage 3"),
        ("--pipeline-schedule auto", "--pipeline-schedule auto has its own row"),
        ("--pipeline-schedule v-half --pipeline-recompute auto", "of --pipeline-recompute: leave"),
    ],
)
def test_a_run_that_cannot_be_planned_is_named_below_the_table(
    words: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_of(capsys, *words.split())
    assert why in found["why_not_given"]
    assert "given" not in found and found["ranked"]
    assert main.main(["plan", *PLANNED, "--", *DENSE, *RUN, *words.split()]) == 0
    assert f"the run as given cannot be planned: {found['why_not_given']}" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_run_that_does_not_fit_is_a_row_and_said_to_be_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--micro-batch-size", "8", "--pipeline-model-parallel-size", "1"]
    more = ("--gpu-memory", "5.4GiB", "--pipeline", "1,2,4,8", "--micro-batch-size", "1")
    found = plan_of(capsys, *words, more=more)
    assert found["given"]["memory"]["total"] > 5.4 * 2**30
    assert "GiB more than there are" in found["given"]["reason"]
