"""Arguments of Megatron-LM that are refused, each in one sentence."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from megatron_arguments import parsed

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.settings import MEGATRON_LM, check_unscheduled
from megatron_zb.megatron_core import refusals, versions
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_core.refusals import Asked
from megatron_zb.megatron_lm import models
from megatron_zb.megatron_lm.adapter_of_arguments import (
    adapter_of,
    asked_of,
    prepare_overlap,
)
from megatron_zb.schedules import interchange
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.two_directions import both_ways
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, v_shape, wave
from megatron_zb.schedules.schedule import Schedule

DOCS = Path(__file__).parents[2] / "docs"
POST_VALIDATION = "--enable-optimizer-post-validation"
WITH_THE_STEP = "overlap_param_gather_with_optimizer_step"


CHOICE = "--pipeline-schedule x"
# How a run fulfils each condition, and what refusals call it.
CONDITIONS: dict[str, tuple[dict[str, Any], str]] = {
    "any": ({}, CHOICE),
    "one_chunk": ({"placements": (looped(4), looped(2))}, CHOICE),
    "chunks": ({"placements": (v_shape(4), looped(4, 2))}, CHOICE),
    "inner_stages": ({"placements": (looped(4), looped(3))}, CHOICE),
    "v": ({"placements": (v_shape(4), wave(4, 4))}, CHOICE),
    "two_ways": ({"placements": (both_ways(4, 1), both_ways(4, 2))}, CHOICE),
    "split": ({}, CHOICE),
    "fixed_order": ({"has_fixed_order": True}, CHOICE),
    "graphs": ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs (transformer_engine)"),
    "verify": ({"pipeline_verify": True}, "--pipeline-verify"),
    "warm_up": ({"pipeline_warm_up": "on"}, "--pipeline-warm-up on"),
    "recompute": ({"pipeline_recompute": "auto"}, "--pipeline-recompute auto"),
    "offload": ({"pipeline_offload": "auto"}, "--pipeline-offload auto"),
    "overlap": ({refusals.OVERLAP: True}, "--overlap-moe-expert-parallel-comm"),
    "vocabulary": ({"pipeline_vocabulary": "on"}, "--pipeline-vocabulary on"),
    "slices": ({"pipeline_slices": 4}, "--pipeline-slices"),
    "adapters": ({"pipeline_adapters": "x.yaml"}, "--pipeline-adapters"),
    "encoder": ({"pipeline_encoder": "on"}, "--pipeline-encoder"),
    "update_delay": ({"pipeline_update_delay": 1}, "--pipeline-update-delay"),
    "update_prediction": (
        {"pipeline_update_delay": 1, "pipeline_update_prediction": "linear"},
        "--pipeline-update-prediction",
    ),
    "copies": ({"pipeline_adapter_copies": True}, "weights: all of --pipeline-adapters"),
    "layer_streams": (
        {"draws_by_layer": True},
        f"--pipeline-random-streams layer, which {CHOICE} brings,",
    ),
    "post_validation": ({"enable_optimizer_post_validation": True}, POST_VALIDATION),
    "file": ({"pipeline_schedule_file": "x.csv"}, "--pipeline-schedule-file"),
    "named": ({"pipeline_schedule": "x"}, CHOICE),
}
NOT: dict[str, dict[str, Any]] = {
    "one_chunk": {"placements": (looped(4), v_shape(4))},
    "chunks": {"placements": (looped(4), v_shape(4))},
    "inner_stages": {"placements": (looped(2), looped(3))},
    "v": {"placements": (looped(4, 2), v_shape(4))},
    "two_ways": {"placements": (v_shape(4), both_ways(4, 1))},
    "split": {"splits": False},
    "any": {"placements": ()},
}
SIZES = {"tensor_model_parallel_size": 2, "bf16": True}
CASES = [
    pytest.param(row, name, condition, stage, id=f"{name} {condition} {stage}")
    for row in refusals.rows()
    for name in row.when
    for condition in row.with_
    for stage in row.stage
]


def asked(**given: Any) -> Asked:
    """A run with these arguments; what :class:`Asked` has as fields goes there."""
    fields = {"placements", "splits", "has_fixed_order", "draws_by_layer", "series", "facts"}
    fields &= given.keys()
    args = argparse.Namespace(**{n: v for n, v in {**SIZES, **given}.items() if n not in fields})
    return Asked(args=args, choice=CHOICE, **{name: given[name] for name in fields})


def passing(name: str, test: dict[str, Any]) -> dict[str, Any]:
    """An argument, or what makes a fact, that passes a test."""
    ((kind, wanted),) = test.items()
    if name == "graphs":
        return {"cuda_graph_impl": wanted if kind == "is" else "transformer_engine"}
    if name == "graphs_leave_experts_out":
        return {"cuda_graph_scope": ["attn"]}
    if name == "precision":
        return {"bf16": False}
    values = {
        "is": wanted,
        "not": "transformer_engine",
        "contains": [wanted],
        "above": 9,
        "below": wanted - 1 if kind == "below" else None,
    }
    return {name: {**values, "given": True, "finite": 2.0}[kind]}


def found(run: Asked, stage: str) -> list[str]:
    return [str(refusal.error) for refusal in refusals.refusals(run, stage)]


@pytest.mark.parametrize(("row", "name", "condition", "stage"), CASES)
def test_every_row_names_both_sides_and_the_reason(
    row: refusals.RefusalRow, name: str, condition: str, stage: str
) -> None:
    """And refuses nothing where one of its sides is not there."""
    held, other = CONDITIONS[condition]
    subject = passing(name, row.when[name])
    only = {k: v for n, t in list(row.if_any.items())[:1] for k, v in passing(n, t).items()}
    run = asked(**{"series": row.until, **only, **held, **subject})
    flag = refusals.said(name, run.value(name))
    if stage == refusals.STEP and name != "graphs":
        flag = name
    sentence = f"{flag} cannot be combined with {other}: {row.why}"
    if row.says:
        value = run.value(name)
        sentence = row.says.format(flag=refusals.said_flag(name), value=value, other=other)
    assert sentence in found(run, stage)
    without: list[dict[str, Any]] = [{**only, **held}]
    if condition != "any":
        without.append({**only, **subject, **NOT.get(condition, {})})
    if row.if_any:
        without.append({**held, **subject})
    if row.until < (99, 0):
        without.append({**only, **held, **subject, "series": (9, 9)})
    if row.since > (0, 0):
        without.append({**only, **held, **subject, "series": (0, 1)})
    for unless, test in row.unless.items():
        without.append({**held, **subject, **passing(unless, test)})
    for given in without:
        assert sentence not in found(asked(**given), stage)


def test_no_row_is_decided_by_a_placement_that_a_schedule_may_not_have() -> None:
    """``auto`` is refused before its search only where every placement would be."""
    line, legacy = "--pipeline-schedule auto", {"ckpt_format": "torch", "save": "here"}
    assert found(asked_of(parsed(line, **legacy)), refusals.START) == []
    zigzag = f"{line} --pipeline-placement zigzag"
    run = asked_of(parsed(zigzag, **legacy, num_virtual_stages_per_pipeline_rank=2))
    assert ["torch_dist" in each for each in found(run, refusals.START)] == [True]


def test_auto_is_refused_before_it_searches() -> None:
    def build(name: str, **request: Any) -> Schedule:
        raise AssertionError("a search has started")

    sizes = {"pipeline_model_parallel_size": 8, "global_batch_size": 64, "num_layers": 64}
    for given in ({"use_torch_fsdp2": True}, {"cuda_graph_impl": "local"}, {"sft": True}):
        args = parsed("--pipeline-schedule auto", **sizes, **given)
        with pytest.raises(UsageError, match="cannot be combined with"):
            adapter_of(args, build, series=(0, 16))


def test_a_restart_in_the_process_is_refused_where_the_arguments_are_parsed_once() -> None:
    args = parsed("--pipeline-schedule zb-h1", inprocess_restart=True)
    for series, sentences in (((0, 16), 0), ((0, 17), 0), ((0, 18), 1), ((0, 20), 1)):
        asked = replace(asked_of(args), series=series)
        said = [each for each in found(asked, refusals.START) if "--inprocess-restart" in each]
        assert len(said) == sentences


def test_packed_samples_are_served_where_every_stage_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, upstream = "--pipeline-schedule zb-h1", {"sft": True}
    monkeypatch.setattr(versions, "core_series", lambda: versions.WITHOUT_SAMPLE_ENDS)
    with pytest.raises(UsageError, match=r"^--sft cannot be combined with .* zb-h1: Megatron-LM"):
        adapter_of(parsed(line, **upstream))
    monkeypatch.setattr(versions, "core_series", lambda: (0, 17))
    adapter_of(parsed(line, **upstream))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pipeline_model_parallel_comm_backend", "ucc"),
        ("tensor_parallel_num_weight_shards", 4),
        ("expert_tensor_parallel_num_weight_shards", 4),
    ],
)
def test_values_that_are_not_served_are_told_from_those_that_are(argument: str, value: Any) -> None:
    line, sizes = "--pipeline-schedule zb-h1", {"tensor_model_parallel_size": 2, "world_size": 8}
    with pytest.raises(UsageError, match=f"^--{argument.replace('_', '-')} {value} cannot be"):
        adapter_of(parsed(line, **sizes, **{argument: value}))
    harmless = 2 if isinstance(value, int) else "nccl"
    adapter_of(parsed(line, **sizes, **{argument: harmless}))


def test_models_that_have_chunks_in_one_version_and_not_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the names of Megatron's classes."""
    hybrid, own = type("HybridModel", (), {}), type("OwnModel", (), {})
    mamba = type("MambaModel", (hybrid,), {})
    check = models.check_model
    for model in (hybrid(), mamba()):
        monkeypatch.setattr(versions, "core_series", lambda: (0, 19))
        check(model, "v-half", in_a_v=True, draws_by_layer=True)
    monkeypatch.setattr(versions, "core_series", lambda: (0, 16))
    check(mamba(), "zb-h1", in_a_v=False, draws_by_layer=False)
    with pytest.raises(UsageError, match=r"v-half cannot run a MambaModel: use one with one chunk"):
        check(mamba(), "v-half", in_a_v=True, draws_by_layer=False)
    with pytest.raises(UsageError, match=r"layers of a MambaModel cannot draw"):
        check(mamba(), "zb-h1", in_a_v=False, draws_by_layer=True)
    with pytest.raises(UsageError, match=r"zb-h1 cannot run a OwnModel: it runs GPTModel, "):
        check(own(), "zb-h1", in_a_v=False, draws_by_layer=False)


def test_what_no_step_can_be_taken_back_with_is_documented() -> None:
    text = (DOCS / "post_validation.md").read_text(encoding="utf-8")
    for row in refusals.rows():
        if "post_validation" in row.with_ and refusals.START in row.stage:
            assert all(f"`{refusals.said_flag(name)}" in text for name in row.when)


@pytest.mark.parametrize(
    "line",
    [
        POST_VALIDATION,
        "--pipeline-random-streams layer",
        "--pipeline-memory-limit 0.5",
        "--pipeline-layer-layout auto",
        "--pipeline-schedule-cache x",
        "--pipeline-verify",
        "--pipeline-warm-up off",
    ],
)
def test_flags_that_need_a_schedule(line: str) -> None:
    with pytest.raises(UsageError, match=f"{line.split()[0]} needs --pipeline-schedule, such as"):
        check_unscheduled(parsed(line), MEGATRON_LM)
    upstream = {"optimizer": "adam", "rerun_mode": "validate_results"}
    line = f"{POST_VALIDATION} --pipeline-schedule v-zb"
    adapter_of(parsed(line, **upstream))


@pytest.mark.parametrize("value", [None, False])
def test_arguments_that_are_not_given_do_not_conflict(value: object) -> None:
    args = parsed("--pipeline-schedule v-half")
    assert found(asked_of(args), refusals.START) == []
    for name in (n for row in refusals.rows() for n, t in row.when.items() if "given" in t):
        if not name.startswith("pipeline_"):
            setattr(args, name, value)
    assert found(asked_of(args), refusals.START) == []


def test_the_value_of_a_conflict_is_told() -> None:
    with pytest.raises(UsageError, match=r"^--ckpt-format torch cannot be combined .*torch_dist$"):
        adapter_of(parsed("--pipeline-schedule v-half", ckpt_format="torch", save="here"))
    adapter_of(parsed("--pipeline-schedule zb-h1", ckpt_format="torch", save="here"))


def test_the_format_of_checkpoints_matters_where_there_are_any() -> None:
    """Megatron-LM has gathers in the optimizer's step with the legacy format alone."""
    line, legacy = "--pipeline-schedule v-half", {"ckpt_format": "torch", "save": None}
    adapter_of(parsed(line, **legacy, **{WITH_THE_STEP: True}))
    for given in ("load", "pretrained_checkpoint"):
        with pytest.raises(UsageError, match=r"^--ckpt-format torch cannot be combined"):
            adapter_of(parsed(line, **legacy, **{given: "here"}))


def test_layers_without_streams_of_their_own_are_graphed() -> None:
    for name in ("cuda_graph_impl", "external_cuda_graph"):
        args = parsed("--pipeline-schedule v-half", **{name: "transformer_engine"})
        with pytest.raises(UsageError, match="layer, which --pipeline-schedule v-half brings,: "):
            adapter_of(args)
        args.pipeline_random_streams = "rank"
        adapter_of(args)


OVERLAPPING = {
    "overlap_moe_expert_parallel_comm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "bf16": True,
}


@pytest.mark.parametrize(
    ("upstream", "said"),
    [
        ({"bf16": False}, "float32"),
        ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs (transformer_engine)"),
    ],
)
def test_precision_and_graphs_of_pairs(upstream: dict[str, Any], said: str) -> None:
    line = "--pipeline-schedule v-half --pipeline-random-streams rank"
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed(line, **(OVERLAPPING | upstream)))
    assert str(refused.value).startswith(
        f"{said} cannot be combined with --overlap-moe-expert-parallel-comm: "
    )


def test_pairs_are_looked_for_beside_an_expert_all_to_all() -> None:
    """And measured where a profile is asked for."""
    line = "--pipeline-schedule v-half --pipeline-profile run.yaml"
    with briefly():
        adapter, usual = adapter_of(parsed(line, **OVERLAPPING)), adapter_of(parsed(line))
    assert adapter.costs.feature(Communication)
    assert not usual.costs.feature(Communication)
    assert "an expert all-to-all of 50% of a forward" in adapter.describe()
    assert ProfilePart in adapter._parts


def test_what_megatron_delays_itself_is_left_to_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parsed("--pipeline-schedule v-half", delay_wgrad_compute=True, **OVERLAPPING)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    lines = prepare_overlap(args)
    assert [line.split()[0] for line in lines] == [
        "--delay-wgrad-compute",
        "--overlap-moe-expert-parallel-comm",
    ]
    assert args.delay_wgrad_compute is False
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert prepare_overlap(args) == []


STATES = [
    ("--pipeline-recompute auto", (PassKind.R,)),
    ("--pipeline-offload auto", (PassKind.D, PassKind.H)),
]


def table_of(path: Path, kinds: tuple[PassKind, ...]) -> Path:
    """Write 1F1B's table in which a unit of the first rank has these passes before its BW."""
    schedule = schedules.build("1f1b", pipeline_size=4, num_microbatches=8)
    first, *others = schedule.ranks
    at = first.index(Pass(PassKind.BW, 0, 3))
    more = tuple(Pass(kind, 0, 3) for kind in kinds)
    ranks = ((*first[:at], *more, *first[at:]), *others)
    interchange.write_csv(replace(schedule, ranks=ranks).validate(), path)
    return path


@pytest.mark.parametrize(("flag", "kinds"), STATES)
def test_a_table_that_drops_or_moves_says_so_itself(
    tmp_path: Path, flag: str, kinds: tuple[PassKind, ...]
) -> None:
    path = table_of(tmp_path / "states.csv", kinds)
    for more in (flag, "--pipeline-host-limit 0.5"):
        with pytest.raises(UsageError, match=r"is a finished schedule: leave .* out"):
            adapter_of(parsed(f"--pipeline-schedule-file {path} {more}"))
    with pytest.raises(UsageError, match=r"--fp8-format hybrid cannot be .*, which has"):
        adapter_of(parsed(f"--pipeline-schedule-file {path}", fp8="hybrid"))


@pytest.mark.parametrize(
    ("upstream", "why"),
    [
        ({"cuda_graph_impl": "local"}, "its graphs share tensors"),
        ({"enable_cuda_graph": True}, "its graphs share tensors"),
        (
            {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0},
            "ranks connect in the first step",
        ),
    ],
)
def test_cuda_graphs_that_would_be_wrong(upstream: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed("--pipeline-schedule zb-h1", **upstream))
    kind = upstream.get("cuda_graph_impl", "local")
    assert str(refused.value).startswith(
        f"CUDA graphs ({kind}) cannot be combined with --pipeline-schedule zb-h1: {why}"
    )


def test_a_schedule_that_graphs_keep_to_is_not_measured() -> None:
    """Megatron's ``auto`` would be built anew for what is measured."""
    line = "--pipeline-schedule auto --pipeline-random-streams rank"
    for kind, measured in (("none", True), ("full_iteration", False)):
        adapter = adapter_of(parsed(line, cuda_graph_impl=kind))
        assert (ProfilePart in adapter._parts) == measured


@pytest.mark.parametrize(
    ("upstream", "flag"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ],
)
def test_a_step_that_cannot_run_twice_is_not_verified(upstream: dict[str, Any], flag: str) -> None:
    adapter_of(parsed("--pipeline-schedule v-half", **upstream))
    with pytest.raises(UsageError, match=f"^{flag} cannot be combined with --pipeline-verify: "):
        adapter_of(parsed("--pipeline-schedule v-half --pipeline-verify", **upstream))
    adapter_of(parsed("--pipeline-schedule v-half --pipeline-verify", fp8_recipe="delayed"))


@pytest.mark.parametrize(
    ("upstream", "flag"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ],
)
def test_state_that_cannot_be_put_back_has_no_warm_up(upstream: dict[str, Any], flag: str) -> None:
    for value in ("auto", "off"):
        adapter_of(parsed(f"--pipeline-schedule v-half --pipeline-warm-up {value}", **upstream))
    with pytest.raises(UsageError, match=f"^{flag} cannot be combined with --pipeline-warm-up on"):
        adapter_of(parsed("--pipeline-schedule v-half --pipeline-warm-up on", **upstream))
