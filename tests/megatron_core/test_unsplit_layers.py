"""The rank that names the layers that stay unsplit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_zb.megatron_core.verification import UnsplitLayers


def group(rank: int) -> Any:
    return SimpleNamespace(rank=lambda: rank)


@pytest.mark.parametrize(
    ("groups", "speaks"),
    [
        ({}, True),
        ({"tp": group(0), "dp_cp": group(0)}, True),
        ({"tp": group(1), "dp_cp": group(0)}, False),
        ({"tp": group(0), "dp_cp": group(1)}, False),
        ({"tp": None, "dp_cp": group(0)}, True),
        ({"tp": None, "dp_cp": group(2)}, False),
    ],
)
def test_the_first_replica_names_new_layers(
    groups: dict[str, Any], speaks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    split: Any = SimpleNamespace(news=lambda: ["layer 3 stays whole"], sizes=(0, 1))
    layers = UnsplitLayers([split], lambda unsplit, frozen: None)
    layers._count = None  # which is collective
    step: Any = SimpleNamespace(
        pg_collection=SimpleNamespace(**groups), pp_rank=0, forward_only=False
    )
    layers.after_step(step)
    assert capsys.readouterr().out == ("megatron_zb: layer 3 stays whole\n" if speaks else "")
