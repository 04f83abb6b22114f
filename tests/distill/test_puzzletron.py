"""Students and libraries from puzzletron's files; tests/trainers has its own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_zb.distill.student import BlockShape, TeacherShape
from megatron_zb.distill.student_files import library_of, read_student
from megatron_zb.errors import UsageError

TEACHER = TeacherShape(2, 64, 8, 4, 64)
OTHERS = {"sparsify": None, "weights_precision": "bf16"}


def block(heads: int | str | None = 4, width: int | None = 64, **more: Any) -> dict[str, Any]:
    """A configuration as puzzletron writes it, without attention or MLP where a size is None."""
    attention = {"no_op": heads is None, "replace_with_linear": False, **OTHERS}
    ffn = {"no_op": width is None, "replace_with_linear": False, **OTHERS}
    return {
        "attention": {**attention, "num_key_value_heads": heads, "llama4": None, "mamba": None},
        "ffn": {**ffn, "moe": None, "intermediate_size": width},
        "parallel_blocks": None,
        **more,
    }


def replacement(of: int, config: Any) -> dict[str, Any]:
    path = f"ckpts/a/subblocks_safetensors/block_{of}_ffn.safetensors"
    return {
        "parent_layer_indices": [of],
        "child_block_configs": [config],
        "weight_paths": [path],
    }


def names_in(content: Any, folder: Path, teacher: TeacherShape = TEACHER) -> list[list[str]]:
    path = folder / "file.json"
    path.write_text(json.dumps(content))
    found = library_of(read_student(path), teacher)
    return [[shape.name for shape in shapes] for shapes in found]


HALF, WHOLE, NO_MLP = block(width=32), block(), block(width=None)


def test_a_models_configuration_is_one_student(tmp_path: Path) -> None:
    """Blocks that stay as they are, too, unless others could take their place."""
    content = {"model_type": "llama", "block_configs": [HALF, WHOLE]}
    assert names_in(content, tmp_path) == [["kv4-ffn32"], ["kv4-ffn64"]]
    assert library_of(read_student(tmp_path / "file.json"), TEACHER)[0] == (
        BlockShape("kv4-ffn32", "attention", 4, "mlp", 32, None),
    )


def test_a_replacement_library_has_several_candidates(tmp_path: Path) -> None:
    """In any order, some as text within the text; the teacher's own blocks are no candidates."""
    linear = block()
    linear["ffn"]["replace_with_linear"] = True
    entries = [
        replacement(1, WHOLE),
        replacement(1, block(heads=2, width=None)),
        json.dumps(replacement(0, NO_MLP)),
        replacement(0, json.dumps(block(heads=None, width=32))),
        replacement(0, WHOLE),
        replacement(0, linear),
        replacement(0, block(parallel_blocks=[HALF])),
        replacement(0, HALF),
    ]
    assert names_in(entries, tmp_path) == [
        ["kv4-no-mlp", "no-attention-ffn32", "kv4-linear-mlp", "kv4-ffn32"],
        ["kv2-no-mlp"],
    ]


@pytest.mark.parametrize("name", ["chosen_block_configs", "block_configs"])
def test_one_solution_is_a_student(name: str, tmp_path: Path) -> None:
    solution = {"chosen_replacements": [], name: [HALF, NO_MLP], "total_value": {"loss": 0.1}}
    assert names_in([solution], tmp_path) == [["kv4-ffn32"], ["kv4-no-mlp"]]


def of_experts(count: int, width: int) -> dict[str, Any]:
    moe = {
        "num_local_experts": count,
        "num_experts_per_tok": 2,
        "expert_intermediate_dim": width,
        "shared_expert_intermediate_dim": 0,
    }
    made = block()
    made["ffn"] |= {"moe": moe, "intermediate_size": None}
    return made


def test_experts_may_be_fewer_and_narrower(tmp_path: Path) -> None:
    teacher = TeacherShape(2, 64, 8, 4, 64, False, frozenset({1}), 16, 8)
    content = {"block_configs": [WHOLE, of_experts(4, 8)]}
    assert names_in(content, tmp_path, teacher) == [["kv4-ffn64"], ["kv4-experts4x8"]]
    found = library_of(read_student(tmp_path / "file.json"), teacher)[1][0]
    assert (found.num_experts, found.ffn_hidden_size) == (4, 8)


MAMBA = block()
MAMBA["attention"]["mamba"] = {"state_dim": 16}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ([], "the list is empty"),
        ({}, "'block_configs' is missing"),
        (3, "file.json has no configurations of blocks"),
        ([{"block_configs": []}] * 2, "2 solutions"),
        ([replacement(1, HALF)], "block 0 has none"),
        (
            [{**replacement(0, HALF), "parent_layer_indices": [0, 1]}],
            "1 blocks stand for 2",
        ),
        ({"block_configs": [HALF]}, "describes 1 blocks, the teacher has 2"),
        ({"block_configs": [HALF, MAMBA]}, r"of block 1 is not understood \(mamba\)"),
        ({"block_configs": [HALF, {"attention": {}}]}, r"block 1 is not understood \('ffn' is mi"),
        ({"block_configs": [HALF, of_experts(4, 8)]}, "moe, where the teacher has 0 experts"),
        ({"block_configs": [HALF, block(heads="x")]}, "block 1 is not understood"),
        ({"block_configs": [HALF, block(width=128)]}, "is more than the teacher's 64"),
        ({"block_configs": [HALF, block(parallel_blocks=[HALF] * 2)]}, "2 parallel blocks"),
    ],
)
def test_what_no_student_is_like_is_refused(content: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=sentence):
        names_in(content, tmp_path)


@pytest.mark.parametrize("text", ["", "[", "[" * 5000, '{"block_configs": [1e999]}'])
def test_damaged_files_are_answered_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "solutions.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"solutions.json has no configurations of blocks"):
        read_student(path)
    with pytest.raises(UsageError, match=r"nowhere.json cannot be read"):
        read_student(tmp_path / "nowhere.json")
