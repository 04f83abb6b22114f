"""The choice of a library's blocks: against all combinations, and what it refuses."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.distill.choice import Budget, choose, main
from megatron_zb.distill.student import TeacherShape
from megatron_zb.distill.student_files import library_of, read_student
from megatron_zb.errors import UsageError

TEACHER = {
    "name": "teacher",
    "attention": "attention",
    "num_query_groups": 4,
    "mlp": "mlp",
    "ffn_hidden_size": 64,
    "score": 0.0,
    "parameters": 100,
    "kv_cache_bytes": 32,
}
HALF = {**TEACHER, "name": "half", "ffn_hidden_size": 32, "score": 0.25, "parameters": 60}
LIBRARY = {"teacher": "nowhere", "bf16": False, "blocks": [[TEACHER, HALF], [TEACHER, HALF]]}


@pytest.mark.parametrize("seed", range(40))
def test_no_combination_is_better(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]

    def table(most: int) -> list[list[float]]:
        return [[draw.randint(0, most) for _ in range(size)] for size in sizes]

    scores = [[cost / 1000 for cost in of] for of in table(10**6)]
    budgets = [
        Budget("parameters", draw.randint(0, 30 * len(sizes)), table(60)),
        Budget("latency", draw.uniform(0, 4) * len(sizes), table(5), 1000),
    ]
    kept = [
        sum(of[c] for of, c in zip(scores, chosen, strict=True))
        for chosen in itertools.product(*map(range, sizes))
        if all(budget.of(chosen) <= budget.limit for budget in budgets)
    ]
    if not kept:
        with pytest.raises(UsageError, match=r"smallest choice needs|no choice keeps"):
            choose(scores, budgets)
        return
    found = choose(scores, budgets)
    assert found.is_best
    assert all(budget.of(found.chosen) <= budget.limit for budget in budgets)
    assert sum(of[c] for of, c in zip(scores, found.chosen, strict=True)) == pytest.approx(
        min(kept), abs=1e-6
    )


@pytest.mark.parametrize("seed", range(20))
def test_blocks_of_one_kind_may_have_to_be_alike(seed: int) -> None:
    """The best of all choices that are, by trying them."""
    draw = random.Random(seed)
    sizes = {"a": draw.randint(1, 4), "b": draw.randint(1, 4)}
    kinds = [draw.choice("ab") for _ in range(5)]
    scores = [[float(draw.randint(0, 100)) for _ in range(sizes[kind])] for kind in kinds]
    costs = [[float(draw.randint(1, 60)) for _ in range(sizes[kind])] for kind in kinds]
    budget = Budget("parameters", draw.randint(100, 200), costs)
    alike = [
        [of[kind] for kind in kinds]
        for candidates in itertools.product(*map(range, sizes.values()))
        for of in [dict(zip(sizes, candidates, strict=True))]
    ]
    kept = [chosen for chosen in alike if budget.of(chosen) <= budget.limit]
    if not kept:
        with pytest.raises(UsageError, match=r"smallest choice needs|with --alike"):
            choose(scores, [budget], kinds)
        return
    sums = [sum(of[c] for of, c in zip(scores, chosen, strict=True)) for chosen in kept]
    found = choose(scores, [budget], kinds)
    assert list(found.chosen) in kept
    assert sum(of[c] for of, c in zip(scores, found.chosen, strict=True)) == pytest.approx(
        min(sums), abs=1e-5
    )


def test_the_layers_are_written_as_puzzletron_has_them(tmp_path: Path) -> None:
    """What a later distillation reads again; alike, though a mix would be better."""
    (tmp_path / "library.json").write_text(json.dumps(LIBRARY))
    path = tmp_path / "blocks.json"
    words = ["--library", str(tmp_path), "--parameters", "80%", "--block-configs", str(path)]
    found = []
    for more in ([], ["--alike"]):
        assert main([*words, *more]) == 0
        shapes = library_of(read_student(path), TeacherShape(2, 64, 8, 4, 64))
        found.append(sorted(shape.ffn_hidden_size for (shape,) in shapes))
    assert found == [[32, 64], [32, 32]]


def test_it_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "library.json").write_text(json.dumps(LIBRARY))
    output = tmp_path / "choice.json"
    words = ["--library", str(tmp_path), "--parameters", "80%", "--output", str(output)]
    assert main([*words, "--kv-cache-bytes", "64"]) == 0
    said = capsys.readouterr().out
    assert "parameters: 160 of 160" in said
    assert "kv_cache_bytes: 64 of 64" in said
    found = json.loads(output.read_text())
    assert sorted(entry["name"] for entry in found["blocks"]) == ["half", "teacher"]
    assert found["score"] == 0.25
    assert found["sums"] == {"parameters": 160, "kv_cache_bytes": 64}


@pytest.mark.parametrize(
    ("files", "words", "sentence"),
    [
        ({}, "--parameters 60%", "library.json cannot be read"),
        ({"library.json": "{"}, "--parameters 60%", "library.json breaks off at line 1"),
        (
            {"library.json": json.dumps({**LIBRARY, "blocks": [[{**HALF, "score": "good"}]]})},
            "--parameters 60%",
            "'blocks.0.0.score' is 'good'",
        ),
        ({"library.json": json.dumps(LIBRARY)}, "", "there is no budget"),
        (
            {"library.json": json.dumps({**LIBRARY, "blocks": [[]]})},
            "--parameters 9",
            "block 0 does",
        ),
        ({"library.json": json.dumps(LIBRARY)}, "--parameters half", "'half' is no budget"),
        (
            {"library.json": json.dumps(LIBRARY)},
            "--parameters 50%",
            "--parameters: the smallest choice needs 120 of 100: give more",
        ),
        ({"library.json": json.dumps(LIBRARY)}, "--latency 3", "must be given together"),
        (
            {"library.json": json.dumps(LIBRARY), "ms.yaml": "milliseconds: {teacher: 1}"},
            "--latency 3 --latency-table ms.yaml",
            "has no time of half",
        ),
    ],
)
def test_mistakes_are_answered_in_one_sentence(
    files: dict[str, str],
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    assert main(["--library", ".", *words.split()]) == 2
    said: Any = capsys.readouterr().err
    assert sentence in said
    assert said.startswith("choice: error: ")
    assert said.count("\n") == 1
