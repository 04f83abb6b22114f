"""Which checkpoints hold the layers, or the optimizer's buffers, in another order than a run's."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from adapters import scheduled

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.adapter import PipelineAdapter
from megatron_zb.megatron_lm import stored_placement
from megatron_zb.schedules.layout import Layers


class Kind(argparse.Namespace):
    """The format that Megatron-LM found: only its name counts."""


LEGACY, GLOBAL = Kind(name="LEGACY"), Kind(name="GLOBAL")
BOUND = "dp_reshardable"  # the distributed optimizer's default format
FREE = "fully_reshardable"


def planned(name: str, **how: Any) -> PipelineAdapter:
    return scheduled(name, pipeline_size=2, num_microbatches=4, layers=Layers(8), **how)


def upstream(**changed: Any) -> argparse.Namespace:
    sizes = {"pipeline_model_parallel_size": 2, "num_layers": 8}
    flags = {"use_distributed_optimizer": True, "finetune": False, "no_load_optim": False}
    return argparse.Namespace(**{**sizes, **flags, **changed})


def test_groups_of_another_rank_are_explained() -> None:
    level = "(encountered at level ('optimizer', 'fp32_from_fp16_params'))"
    error = ValueError(f"Dict key 2 out of bound for list of length2 {level}")
    found = stored_placement.other_groups(error, "runs/a")
    assert found is not None
    assert "checkpoint runs/a" in str(found)
    assert "--no-load-optim" in str(found)
    assert stored_placement.other_groups(ValueError("another"), "runs/a") is None


def load(
    saved: PipelineAdapter | argparse.Namespace,
    run: PipelineAdapter | argparse.Namespace,
    kind: Kind = GLOBAL,
    sharding: str = BOUND,
    **flags: Any,
) -> None:
    """Check a checkpoint of the first for a run of the second."""
    saved_args = saved if isinstance(saved, argparse.Namespace) else upstream()
    if isinstance(saved, PipelineAdapter):
        stored_placement.mark(saved_args, saved)
    state = {"args": saved_args, "content_metadata": {"distrib_optim_sharding_type": sharding}}
    args = run if isinstance(run, argparse.Namespace) else upstream(**flags)
    adapter = run if isinstance(run, PipelineAdapter) else None
    stored_placement.check((state, "iter_0000002", False, kind), args, adapter)


SAME = [
    (upstream(), planned("zb-h1")),
    (planned("zb-h1"), upstream()),
    (planned("zb-h1"), planned("1f1b")),
    (planned("v-half"), planned("v-zb")),
    (upstream(virtual_pipeline_model_parallel_size=2), planned("interleaved")),
    (
        upstream(pipeline_model_parallel_layout="Et*5|t*3L"),
        planned("zb-h1", layer_layout="Ettttt|tttL"),
    ),
    (upstream(), upstream(pipeline_model_parallel_size=4)),  # Megatron's own affair
]
OTHER = [
    (upstream(), planned("v-half")),
    (planned("v-half"), upstream()),
    (upstream(), planned("interleaved")),
    (planned("interleaved"), upstream()),
    (planned("interleaved"), planned("zb-h1")),
    (planned("v-half"), planned("wave")),
    (planned("v-half"), planned("v-half", layer_layout="Ett|ttt|tt|tL")),
    (upstream(pipeline_model_parallel_layout="Et*5|t*3L"), planned("zb-h1")),
    (upstream(decoder_first_pipeline_num_layers=3), planned("zb-h1")),
]


@pytest.mark.parametrize(("saved", "run"), SAME)
@pytest.mark.parametrize("kind", [LEGACY, GLOBAL], ids=["legacy", "torch_dist"])
def test_equal_placements_load_each_other(saved: Any, run: Any, kind: Kind) -> None:
    load(saved, run, kind)


@pytest.mark.parametrize(("saved", "run"), OTHER)
def test_other_placements_are_refused_where_buffers_follow_ranks(saved: Any, run: Any) -> None:
    with pytest.raises(UsageError, match="--dist-ckpt-optim-fully-reshardable"):
        load(saved, run)
    with pytest.raises(UsageError, match="--ckpt-format torch_dist"):
        load(saved, run, LEGACY)
    load(saved, run, sharding=FREE)


@pytest.mark.parametrize(
    "flag", [{"finetune": True}, {"no_load_optim": True}, {"use_distributed_optimizer": False}]
)
def test_weights_alone_go_anywhere(flag: dict[str, Any]) -> None:
    load(planned("v-half"), planned("zb-h1"), **flag)


def test_what_says_nothing_of_itself_is_left_to_megatron() -> None:
    stored_placement.check(({}, "release", True, GLOBAL), upstream(), planned("v-half"))
