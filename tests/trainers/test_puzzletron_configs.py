"""Block configurations that are written, as the classes of NVIDIA Model-Optimizer read them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from installed_trainers import missing_trainers

from megatron_zb.distill import puzzletron
from megatron_zb.distill.puzzletron import Routing
from megatron_zb.distill.student import BlockShape, TeacherShape

MISSING = missing_trainers()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

TEACHER = TeacherShape(4, 64, 8, 4, 64, False, frozenset({3}), 16, 8, 8)
SHAPES = [
    BlockShape("kv2-ffn32", "attention", 2, "mlp", 32, None),
    BlockShape("no-attention-linear-mlp", "no_op", 4, "linear", 64, None),
    BlockShape("linear-attention-no-mlp", "linear", 4, "no_op", 64, None),
    BlockShape("kv4-experts4x8", "attention", 4, "mlp", 8, None, 4),
]


@pytest.fixture(scope="module")
def block_config() -> Any:
    """Puzzletron's module of them. Its package would import hydra, for its command line."""
    found = importlib.util.find_spec("modelopt")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(found.submodule_search_locations[0], "torch/puzzletron/block_config.py")
    spec = importlib.util.spec_from_file_location("puzzletron_block_config", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_every_shape_is_written_and_read_again(block_config: Any, tmp_path: Path) -> None:
    written = puzzletron.described(SHAPES, Routing(2, 32))["block_configs"]
    configs = [block_config.BlockConfig(**config) for config in written]
    assert [config.attention.num_key_value_heads for config in configs] == [2, None, 4, 4]
    assert [config.attention.no_op for config in configs] == [False, True, False, False]
    assert [config.ffn.replace_with_linear for config in configs] == [False, True, False, False]
    assert configs[0].ffn.intermediate_size == 32
    experts = configs[3].ffn.moe
    assert (experts.num_local_experts, experts.num_experts_per_tok) == (4, 2)
    assert (experts.expert_intermediate_dim, experts.shared_expert_intermediate_dim) == (8, 32)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"block_configs": [config.to_dict() for config in configs]}))
    assert [of for (of,) in puzzletron.read(path).library(TEACHER)] == SHAPES
