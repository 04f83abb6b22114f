"""Blocks that several ranks share: what they learn, and what is stored of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from distillation_cases import (
    EMPTY,
    EXPERTS,
    GPT,
    HALF,
    LATENT,
    LAYERS,
    LINEAR,
    LLAMA,
    SLOW,
    differences,
    enter,
    learnt_alone,
    learnt_in_pipeline,
)
from ranks import RankPools

MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "latent": {**LLAMA, **LATENT},
    "experts": {**LLAMA, **EXPERTS},
    "deepseek": {**LLAMA, **LATENT, **EXPERTS},
}
TENSOR = ("--tensor-model-parallel-size", "2")
SEQUENCE = (*TENSOR, "--sequence-parallel")
SPLIT_EXPERTS = ("--expert-model-parallel-size", "2")
BOTH = (*SEQUENCE, *SPLIT_EXPERTS)
ONE: tuple[str, ...] = ()


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one rank writes the teachers."""
    return tmp_path_factory.mktemp("teachers")


@pytest.mark.parametrize(
    ("model", "candidates", "distribution", "shares", "flags"),
    [
        ("llama", [HALF, SLOW], "0-1:1,2-3:1", 1, SEQUENCE),
        pytest.param("llama", [HALF, LINEAR, EMPTY], "0-3:1", 1, TENSOR, marks=pytest.mark.full),
        pytest.param("gpt", [HALF, SLOW], "0-3:2", 2, SEQUENCE, marks=pytest.mark.full),
        pytest.param("gpt", [SLOW], "0:1,1-3:1", 1, TENSOR, marks=pytest.mark.full),
        ("deepseek", [HALF, EMPTY], "0-1:1,2-3:1", 1, SPLIT_EXPERTS),
        pytest.param("latent", [HALF], "0-1:1,2-3:1", 1, SEQUENCE, marks=pytest.mark.full),
        pytest.param("experts", [HALF, SLOW], "0-1:1,2-3:1", 1, ONE, marks=pytest.mark.full),
        pytest.param("deepseek", [HALF], "0-3:1", 1, BOTH, marks=pytest.mark.full),
    ],
)
def test_split_blocks_learn_in_the_pipeline_what_they_learn_alone(
    model: str,
    candidates: Sequence[Mapping[str, Any]],
    distribution: str,
    shares: int,
    flags: Sequence[str],
    ranks: RankPools,
    corpus: str,
    teachers: Path,
) -> None:
    """Every rank's part, to the last bit; ranks that share a block relay to as many others."""
    each = 2 ** sum(flag.endswith("parallel-size") for flag in flags)
    size = each * sum(int(part.partition(":")[2]) for part in distribution.split(","))
    teacher = str(teachers / model)
    ranks(1).run(enter, model=MODELS[model], folder=teacher)
    case: dict[str, Any] = {"corpus": corpus, "teacher": teacher, "model": MODELS[model]}
    case["candidates"] = candidates
    alone = ranks(each).run(learnt_alone, **case, shares=[shares] * LAYERS, flags=flags)
    given = [*flags, "--distribution", distribution]
    seen = set()
    for rank, learnt in enumerate(ranks(size).run(learnt_in_pipeline, **case, flags=given)):
        assert differences(learnt, alone[rank % each]) == []
        seen |= set(learnt)
    assert seen == {(block, c["name"]) for block in range(LAYERS) for c in candidates}
