"""What ranks compare at the start tells runs apart that could not run together."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from adapters import scheduled

from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm import fingerprint
from megatron_zb.schedules.layout import Layers


def adapter(
    name: str = "v-half", microbatches: int = 8, layout: str | None = None
) -> PipelineAdapter:
    return scheduled(
        name,
        pipeline_size=2,
        num_microbatches=microbatches,
        layers=Layers(8),
        layer_layout=layout,
    )


def values(
    of: PipelineAdapter | None = None,
    variables: dict[str, str] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    args = argparse.Namespace(**{"seq_length": 32, "hidden_size": 64, **arguments})
    data = fingerprint.data_of(args)
    found = fingerprint.of_run(args, of or adapter(), data, variables or {})
    return fingerprint.of_arguments(args) | found


def test_equal_runs_are_equal() -> None:
    assert values() == values()


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("the schedule", values(adapter("v-zb"))),
        ("a table with the digest", values(adapter(microbatches=6))),
        ("layers placed as", values(adapter(layout="Ett|tt|t|tttL"))),
        ("microbatches", values(adapter(microbatches=6))),
        ("--seq-length", values(seq_length=64)),
        ("--params-dtype", values(params_dtype="torch.bfloat16")),
        ("--lr", values(lr=2.0)),
        ("--data-path", values(data_path=["a"])),
        ("CUDA_DEVICE_MAX_CONNECTIONS", values(None, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})),
        ("NVTE_FLASH_ATTN", values(None, {"NVTE_FLASH_ATTN": "0"})),
    ],
)
def test_a_difference_shows_under_its_name(name: str, other: dict[str, Any]) -> None:
    assert other.get(name) != values().get(name)


def test_contents_of_files_count_and_not_their_dates(tmp_path: Path) -> None:
    """Data sets that a file lists, a tokenizer and a file of the model's shape."""
    names = ("data_args_path", "tokenizer_model", "heterogeneous_layers_config_path")
    files = {name: tmp_path / name for name in names}
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").write_text("one")
    for name, file in files.items():
        file.write_text(f"1.0 {tmp_path / 'text'}" if name == "data_args_path" else "one")
    arguments: dict[str, Any] = {name: str(file) for name, file in files.items()}
    before = values(**arguments)
    for file in (*files.values(), tmp_path / "text.bin"):
        kept = file.read_text()
        os.utime(file, (0, 0))
        assert values(**arguments) == before
        file.write_text(kept.replace("one", "two") if "one" in kept else f"{kept}\n")
        other = values(**arguments)
        assert [n for n in before if other.get(n) != before[n]], file
        file.write_text(kept)
    assert values(**arguments) == before


def test_what_may_differ_between_hosts_does_not_count() -> None:
    assert values(None, {"HOSTNAME": "a", "NCCL_SOCKET_IFNAME": "eth1"}) == values()
