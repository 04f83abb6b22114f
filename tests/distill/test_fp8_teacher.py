"""Teachers in fp8, over Transformer-Engine's modules and stand-ins for its kernels."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from distillation_cases import (
    GPT,
    HALF,
    LATENT,
    LLAMA,
    MIXTRAL,
    QWEN,
    SEQUENCE,
    Key,
    Learnt,
    enter,
    job_of,
    learnt_in_pipeline,
)
from prepared_text import prepared
from rank_process import Kind
from ranks import RankPools

from megatron_zb.distill import flags
from megatron_zb.distill.blocks import taught
from megatron_zb.distill.lanes import Lanes
from megatron_zb.distill.place import Place, parse_distribution
from megatron_zb.distill.stage import open_stage_blocks
from megatron_zb.errors import UsageError

WIDE = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
MODELS: Mapping[str, Mapping[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "qwen": QWEN,
    "latent": {**LLAMA, **LATENT, **dict.fromkeys(WIDE, 32)},
    "mixtral": MIXTRAL,
}
NEITHER = {"num_experts": None, "multi_latent_attention": False}
BATCH = "--micro-batch-size 1 --global-batch-size 8 --lr 0.1 --train-iters 1".split()
RECIPES = ("tensorwise", "blockwise", "mxfp8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return prepared(tmp_path_factory.mktemp("text"), most_bytes=100_000)


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """The command line refuses what only stand-ins compute."""
    with mock.patch.object(flags, "_check_fp8"):
        yield


def compared(
    corpus: str, teacher: str, model: Mapping[str, Any], recipe: str, flags: Sequence[str]
) -> dict[str, Any]:
    """The outputs of the teacher's layers in 16 bits and in fp8, and what else is unlike."""
    enter(model, teacher, flags)
    job = job_of(corpus, teacher, [HALF], "--bf16", *flags)
    distribution = parse_distribution("0-3:1", 4, None)
    given = torch.randn(SEQUENCE, 2, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    if job.args.sequence_parallel:
        given = given.chunk(2)[torch.distributed.get_rank()]
    outputs, students, counts = {}, [], {}
    for chosen in (None, recipe):
        args = argparse.Namespace(**{**vars(job.args), "teacher_fp8": chosen})
        place = Place.of_this_rank(distribution, Lanes.of(args))
        blocks = open_stage_blocks(args, job.teacher, job.library, place)
        students.append(
            [p for each in blocks.all_student_blocks() for p in each.layer.parameters()]
        )
        for microbatch in range(2):
            with counted() as quantized:
                made = given
                for layer in blocks.layers:
                    made = taught(layer, made, blocks.rotary)
            counts[chosen, microbatch] = len(quantized)
        outputs[chosen] = made.float()
    exact, rounded = outputs.values()
    return {
        "off": float((exact - rounded).norm() / exact.norm()),
        "students": all(map(torch.equal, *students)),
        "counts": list(counts.values()),
    }


@contextmanager
def counted() -> Iterator[list[None]]:
    """Count what is quantised."""
    import te_quantization

    seen: list[None] = []
    usual = te_quantization._quantize

    def quantize(*arguments: Any) -> None:
        seen.append(None)
        usual(*arguments)

    with mock.patch.object(te_quantization, "_quantize", quantize):
        yield seen


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", MODELS)
def test_a_teacher_in_fp8_is_rounded_and_its_students_are_not(
    ranks: RankPools, text: str, tmp_path: Path, model: str, recipe: str
) -> None:
    case: dict[str, Any] = {
        "corpus": text,
        "teacher": str(tmp_path / "teacher"),
        "model": MODELS[model],
    }
    pool = ranks(1, Kind.TRANSFORMER_ENGINE)
    (found,) = pool.run(compared, **case, recipe=recipe, flags=[])
    assert 1e-4 < found["off"] < 0.1
    assert found["students"]
    none, none_again, first, second = found["counts"]
    assert none == none_again == 0
    assert first > second >= first / 2  # inputs again, but weights once


@pytest.mark.parametrize("sequence", [[], ["--sequence-parallel"]], ids=["", "sp"])
def test_a_split_teacher_in_fp8(
    ranks: RankPools, text: str, tmp_path: Path, sequence: list[str]
) -> None:
    case: dict[str, Any] = {"corpus": text, "teacher": str(tmp_path / "teacher"), "model": LLAMA}
    split = ["--tensor-model-parallel-size", "2", *sequence]
    for found in ranks(2, Kind.TRANSFORMER_ENGINE).run(
        compared, **case, recipe="tensorwise", flags=split
    ):
        assert 1e-4 < found["off"] < 0.1
        assert found["students"]


def learnt_from_fp8(**case: Any) -> dict[Key, Learnt]:
    with on_a_cpu():
        return learnt_in_pipeline(**case)


def test_students_of_a_teacher_in_fp8_learn_the_same_in_a_pipeline(
    ranks: RankPools, text: str, tmp_path: Path
) -> None:
    case: dict[str, Any] = {"corpus": text, "model": LLAMA, "candidates": [HALF]}
    found = []
    for distribution in ("0-3:1", "0-1:1,2-3:1"):
        words = ["--teacher-fp8", "tensorwise", "--distribution", distribution]
        pool = ranks(distribution.count(":"), Kind.TRANSFORMER_ENGINE)
        of_ranks = pool.run(
            learnt_from_fp8, **case, teacher=str(tmp_path / distribution), flags=words
        )
        found.append({key: each for of_rank in of_ranks for key, each in of_rank.items()})
    alone, apart = found
    assert alone.keys() == apart.keys()
    for key, learnt in alone.items():
        for name, weight in learnt.weights.items():
            assert torch.equal(weight, apart[key].weights[name]), (key, name)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cpu"], "--teacher-fp8 needs a GPU"),
        ([], "--teacher-fp8 needs the package transformer_engine, which is not installed"),
    ],
)
def test_what_cannot_run_in_fp8_is_refused(words: list[str], sentence: str, tmp_path: Path) -> None:
    given = ["--teacher-load", str(tmp_path), "--student-config", "none.yaml", "--mock-data"]
    with (
        mock.patch.object(flags, "find_spec", return_value=None),
        pytest.raises(UsageError, match=sentence),
    ):
        flags.parse([*given, *BATCH, "--teacher-fp8", "blockwise", *words])


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"hidden_size": 48}, "hidden size on a rank: 48"),
        ({"ffn_hidden_size": 80}, "width of the MLP on a rank: 80"),
        ({"kv_channels": 10}, "queries, keys and values on a rank: 120"),
        ({"seq_length": 15, "max_position_embeddings": 15}, "tokens of a microbatch on a rank: 15"),
    ],
)
def test_sizes_that_fp8_does_not_take_are_refused(
    sizes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    given = ["--teacher-load", str(tmp_path), "--student-config", "none.yaml", "--mock-data"]
    with on_a_cpu():
        args = flags.parse([*given, *BATCH, "--cpu", "--teacher-fp8", "mxfp8"])
        with pytest.raises(UsageError, match=sentence):
            flags.complete(args, {**LLAMA, **NEITHER, "kv_channels": 8, **sizes})
