"""The folder for PEFT: its matrices do to Llama's layers what ours do to Megatron's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brief_searches import briefly
from gpt_cases import GPTCase, built
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.utils import get_model_config, unwrap_model
from ranks import RankPools
from safetensors.torch import load_file

from megatron_zb import schedules
from megatron_zb.lora import peft_folder
from megatron_zb.lora.adapter_file import AdapterEntry, AdapterJob
from megatron_zb.lora.layers import LoRALayers, LoRAShape
from megatron_zb.lora.training import AdapterOptimizer, wrapped
from megatron_zb.schedules.features.adapters import Adapter, Adapters

RANK, ALPHA = 4, 8.0
MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
LLAMA = GPTCase(
    wrapped=False,
    layers=2,
    rotary=True,
    options=(
        ("num_query_groups", 2),
        ("gated_linear_unit", True),
        ("activation_func", torch.nn.functional.silu),
        ("add_bias_linear", False),
    ),
)
JOB = AdapterJob(AdapterEntry.model_validate({"name": "a", "rank": RANK, "alpha": ALPHA}), {}, 1)


def write(case: GPTCase, folder: Path) -> list[dict[str, torch.Tensor]]:
    """Write the folder; return what Megatron's layers of this rank do to random inputs."""
    p = torch.distributed.get_world_size() // case.tensor_parallel
    with briefly():
        order = schedules.build(
            "1f1b", pipeline_size=p, adapters=Adapters((Adapter("a", 1), Adapter("b", 1)))
        )
    with built(case, order, 2) as (_, chunks):
        layers = LoRALayers(chunks, {"a": LoRAShape(RANK, ALPHA, MODULES, 1)})
        for weights in layers.weights["a"]:
            for name, weight in weights.named_weights().items():
                if name.endswith("up"):  # as after some steps
                    weight.data.copy_(_drawn(name, *weight.shape))
        ddp = wrapped(layers.weights["a"], DistributedDataParallelConfig(), "a")
        config = get_model_config(chunks[0])
        peft_folder.write(folder, JOB, AdapterOptimizer(ddp, None, None, 1), config)
        if case.tensor_parallel > 1:
            return []
        layers.select(0, "a")
        return [_outputs(layer) for layer in unwrap_model(chunks[0]).decoder.layers]


def _drawn(name: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(map(ord, name))))


def _outputs(layer: Any) -> dict[str, torch.Tensor]:
    attention, mlp = layer.self_attention, layer.mlp
    size = attention.linear_qkv.weight.shape[1]
    x = _drawn("x", 3, 1, size)
    with torch.no_grad():
        query, key, value = attention.get_query_key_value_tensors(x)[:3]
        seen = _drawn("seen", 3, 1, attention.linear_proj.weight.shape[1])
        return {
            "number": torch.tensor(layer.layer_number - 1),
            "x": x,
            "seen": seen,
            "q_proj": query.flatten(2),
            "k_proj": key.flatten(2),
            "v_proj": value.flatten(2),
            "o_proj": attention.linear_proj(seen)[0],
            "mlp": mlp(x)[0],
            "qkv": attention.linear_qkv.weight.clone(),
            "proj": attention.linear_proj.weight.clone(),
            "fc1": mlp.linear_fc1.weight.clone(),
            "fc2": mlp.linear_fc2.weight.clone(),
        }


def _base(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The base's weights as Hugging Face has them."""
    heads = peft_folder.Heads(4, 2, found["proj"].shape[1] // 4, is_gated=True)
    names = {
        f"decoder.layers.0.{part}.linear_{own}.up": [found[own]]
        for part, own in (
            ("self_attention", "qkv"),
            ("self_attention", "proj"),
            ("mlp", "fc1"),
            ("mlp", "fc2"),
        )
    }
    return {name.split(".")[-3]: it for name, it in peft_folder.renamed(names, heads)}


def test_a_model_of_llama_with_the_folder_computes_the_same(
    ranks: RankPools, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    of_layers = [it for rank in ranks(2).run(write, case=LLAMA, folder=tmp_path) for it in rank]
    about = json.loads((tmp_path / "a" / "peft" / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["peft_type"]) == (RANK, ALPHA, "LORA")
    tensors = load_file(tmp_path / "a" / "peft" / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * len(of_layers)
    assert len(of_layers) == LLAMA.layers
    for found in of_layers:
        base = _base(found)

        def apply(name: str, x: torch.Tensor, found: Any = found, base: Any = base) -> torch.Tensor:
            part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            place = f"base_model.model.model.layers.{int(found['number'])}.{part}.{name}"
            down, up = (tensors[f"{place}.lora_{letter}.weight"] for letter in "AB")
            return x @ (base[name] + ALPHA / RANK * up @ down).T

        x = found["x"]
        for name in ("q_proj", "k_proj", "v_proj"):
            torch.testing.assert_close(apply(name, x), found[name], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            apply("o_proj", found["seen"]), found["o_proj"], rtol=1e-4, atol=1e-4
        )
        inner = torch.nn.functional.silu(apply("gate_proj", x)) * apply("up_proj", x)
        torch.testing.assert_close(apply("down_proj", inner), found["mlp"], rtol=1e-3, atol=1e-3)
    assert sorted(about["target_modules"]) == sorted(base)


@pytest.mark.long
def test_the_folder_does_not_depend_on_tensor_parallelism(ranks: RankPools, tmp_path: Path) -> None:
    """All matrices have rows and columns in one order; the values of ``up`` are drawn by rank."""
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        (path / "a").mkdir(parents=True)
    ranks(2).run(write, case=LLAMA, folder=one)
    ranks(4).run(write, case=replace(LLAMA, tensor_parallel=2), folder=two)
    plain, sharded = (
        load_file(path / "a" / "peft" / "adapter_model.safetensors") for path in (one, two)
    )
    assert plain.keys() == sharded.keys()
    for name, value in plain.items():
        assert value.shape == sharded[name].shape
        if "lora_A" in name:
            assert torch.equal(value, sharded[name]), name
