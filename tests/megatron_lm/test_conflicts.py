"""Arguments of Megatron-LM that are refused, each in one sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from brief_searches import briefly
from megatron_arguments import parsed

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job import run_flags
from megatron_zb.megatron_core import graphs, versions
from megatron_zb.megatron_core.profiled_steps import ProfilePart
from megatron_zb.megatron_lm import conflicts
from megatron_zb.megatron_lm.adapter_of_arguments import (
    adapter_of,
    check_unscheduled,
    prepare_overlap,
)
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import interchange
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, v_shape

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("conflict", conflicts.CONFLICTS, ids=lambda conflict: conflict.argument)
def test_every_conflict_names_both_flags_and_the_reason(
    conflict: conflicts.Conflict, monkeypatch: pytest.MonkeyPatch
) -> None:
    if conflict.last is not None:
        monkeypatch.setattr(versions, "core_series", lambda: conflict.last)
    value: Any = True if conflict.above is None else 2
    if conflict.argument == "non_persistent_ckpt_type":
        value = "local"
    others = dict.fromkeys(conflict.only_with[:1], "a value")
    args = argparse.Namespace(tensor_model_parallel_size=1, **{conflict.argument: value}, **others)
    concerned = looped(4) if conflict.concerned is conflicts.Concerned.ONE_CHUNK else v_shape(4)
    with pytest.raises(UsageError) as refused:
        conflicts.check(args, "--pipeline-schedule v-half", concerned)
    said = conflict.flag if value is True else f"{conflict.flag} {value}"
    assert str(refused.value) == (
        f"{said} cannot be combined with --pipeline-schedule v-half: {conflict.why}"
    )
    assert conflict.flag == "--" + conflict.argument.replace("_", "-")
    if conflict.concerned is conflicts.Concerned.INNER_STAGES:
        conflicts.check(args, "zb-h1", looped(2))
    elif conflict.concerned is conflicts.Concerned.ONE_CHUNK:
        conflicts.check(parsed("", **{conflict.argument: value}), "v-half", v_shape(4))
    elif conflict.concerned is conflicts.Concerned.SPLIT:
        conflicts.check(args, "1f1b", looped(4), splits=False)
    elif conflict.concerned is not conflicts.Concerned.ALL:
        conflicts.check(args, "zb-h1", looped(4))
    if conflict.concerned is conflicts.Concerned.V:
        conflicts.check(args, "interleaved", looped(4, 2))


def test_packed_samples_are_served_where_every_stage_hears_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, stock = "--pipeline-schedule zb-h1", {"sft": True}
    monkeypatch.setattr(versions, "core_series", lambda: versions.WITHOUT_SAMPLE_ENDS)
    with pytest.raises(UsageError, match=r"^--sft cannot be combined with .* zb-h1: Megatron-LM"):
        adapter_of(parsed(line, **stock))
    monkeypatch.setattr(versions, "core_series", lambda: (0, 17))
    adapter_of(parsed(line, **stock))


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
    check = conflicts.check_model
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


@pytest.mark.parametrize(
    "conflict", conflicts.POST_VALIDATION_CONFLICTS, ids=lambda conflict: conflict.argument
)
def test_what_no_step_can_be_taken_back_with_is_refused(conflict: conflicts.Conflict) -> None:
    values = {"optimizer": "muon", "grad_norm_skip_threshold": 2.0, "rerun_mode": "report_stats"}
    value: Any = values.get(conflict.argument, 1)
    line = "--pipeline-schedule zb-h1"
    sizes = {"pipeline_model_parallel_size": 2}  # where each stage is the first or the last
    args = parsed(f"{line} {conflicts.POST_VALIDATION}", **sizes, **{conflict.argument: value})
    with pytest.raises(UsageError) as refused:
        adapter_of(args)
    assert str(refused.value) == (
        f"{conflict.flag} {value} cannot be combined with {conflicts.POST_VALIDATION}: "
        f"{conflict.why}"
    )
    adapter_of(parsed(line, **sizes, **{conflict.argument: value}))
    assert f"`{conflict.flag}" in (DOCS / "post_validation.md").read_text()


@pytest.mark.parametrize(
    "line",
    [
        conflicts.POST_VALIDATION,
        "--pipeline-random-streams layer",
        "--pipeline-memory-limit 0.5",
        "--pipeline-layer-layout auto",
        "--pipeline-schedule-cache x",
        "--pipeline-verify",
    ],
)
def test_flags_that_need_a_schedule(line: str) -> None:
    with pytest.raises(UsageError, match=f"{line.split()[0]} needs --pipeline-schedule, such as"):
        check_unscheduled(parsed(line))
    stock = {"optimizer": "adam", "rerun_mode": "validate_results"}
    line = f"{conflicts.POST_VALIDATION} --pipeline-schedule v-zb"
    adapter_of(parsed(line, **stock))


@pytest.mark.parametrize("value", [None, False])
def test_arguments_that_are_not_given_do_not_conflict(value: object) -> None:
    names = [c.argument for c in conflicts.CONFLICTS if c.applies is bool]
    conflicts.check(argparse.Namespace(**dict.fromkeys(names, value)), "any", v_shape(4))
    conflicts.check(argparse.Namespace(), "any", v_shape(4))
    conflicts.check(parsed(), "any", v_shape(4))


def test_the_value_of_a_conflict_is_told() -> None:
    with pytest.raises(UsageError, match=r"^--ckpt-format torch cannot be combined .*torch_dist$"):
        adapter_of(parsed("--pipeline-schedule v-half", ckpt_format="torch", save="here"))
    adapter_of(parsed("--pipeline-schedule zb-h1", ckpt_format="torch", save="here"))


def test_the_format_of_checkpoints_matters_where_there_are_any() -> None:
    """Megatron-LM has gathers in the optimizer's step with the legacy format alone."""
    line, legacy = "--pipeline-schedule v-half", {"ckpt_format": "torch", "save": None}
    adapter_of(parsed(line, **legacy, **{conflicts.WITH_THE_STEP: True}))
    for given in ("load", "pretrained_checkpoint"):
        with pytest.raises(UsageError, match=r"^--ckpt-format torch cannot be combined"):
            adapter_of(parsed(line, **legacy, **{given: "here"}))


@pytest.mark.parametrize("conflict", conflicts.LAYER_STREAMS_CONFLICTS, ids=lambda c: c.argument)
@pytest.mark.parametrize(
    ("line", "chosen"),
    [
        ("zb-h1 --pipeline-random-streams layer", "--pipeline-random-streams layer"),
        ("v-half", "--pipeline-random-streams layer, which --pipeline-schedule v-half brings"),
    ],
)
def test_what_streams_of_layers_cannot_be_had_with(
    conflict: conflicts.Conflict, line: str, chosen: str
) -> None:
    value: Any = "transformer_engine" if conflict.argument == "cuda_graph_impl" else True
    args = parsed(f"--pipeline-schedule {line}", **{conflict.argument: value})
    with pytest.raises(UsageError) as error:
        conflicts.check_layer_streams(args)
    for part in (conflict.flag, chosen, "add --pipeline-random-streams rank"):
        assert part in str(error.value)
    by_rank = "--pipeline-schedule zb-h1 --pipeline-random-streams rank"
    if conflict.argument != "enable_cuda_graph":  # those of layers, by Megatron itself
        adapter_of(parsed(by_rank, **{conflict.argument: value}))


OVERLAPPING = {
    "overlap_moe_expert_parallel_comm": True,
    "moe_token_dispatcher_type": "alltoall",
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "bf16": True,
}
WRONG = {
    "expert_model_parallel_size": 1,
    "moe_token_dispatcher_type": "allgather",
    "recompute_granularity": "full",
    "recompute_modules": ["moe"],
    "mtp_num_layers": 2,
    "fp4": "e2m1",
    "hybrid_layer_pattern": "M*ME",
}


@pytest.mark.parametrize("conflict", conflicts.PAIR_CONFLICTS, ids=lambda c: c.argument)
def test_what_no_pairs_can_be_had_with(conflict: conflicts.Conflict) -> None:
    value = WRONG.get(conflict.argument, True)
    line = "--pipeline-schedule v-half"
    conflicts.check_pairs(parsed(line, **{conflict.argument: value}))
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed(line, **{**OVERLAPPING, conflict.argument: value}))
    said = conflict.flag if value is True else f"{conflict.flag} {value}"
    assert str(refused.value) == (
        f"{said} cannot be combined with --overlap-moe-expert-parallel-comm: {conflict.why}"
    )


@pytest.mark.parametrize(
    ("stock", "said"),
    [
        ({"bf16": False}, "float32"),
        ({"cuda_graph_impl": "transformer_engine"}, "CUDA graphs (transformer_engine)"),
    ],
)
def test_precision_and_graphs_of_pairs(stock: dict[str, Any], said: str) -> None:
    line = "--pipeline-schedule v-half --pipeline-random-streams rank"
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed(line, **(OVERLAPPING | stock)))
    assert str(refused.value).startswith(
        f"{said} cannot be combined with --overlap-moe-expert-parallel-comm: "
    )


def test_pairs_are_looked_for_where_experts_exchange() -> None:
    """And measured where a profile is asked for."""
    line = "--pipeline-schedule v-half --pipeline-profile run.yaml"
    with briefly():
        adapter, usual = adapter_of(parsed(line, **OVERLAPPING)), adapter_of(parsed(line))
    assert adapter.costs.forward_comm
    assert not usual.costs.forward_comm
    assert "an exchange between experts of 50% of a forward" in adapter.describe()
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
    ("--pipeline-recompute auto", conflicts.RECOMPUTATION_CONFLICTS, (PassKind.R,)),
    ("--pipeline-offload auto", conflicts.OFFLOAD_CONFLICTS, (PassKind.D, PassKind.H)),
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


@pytest.mark.parametrize("from_table", [False, True])
@pytest.mark.parametrize(
    ("asked", "conflict", "kinds"),
    [(asked, conflict, kinds) for asked, known, kinds in STATES for conflict in known],
    ids=lambda value: getattr(value, "argument", None),
)
def test_what_no_activations_are_dropped_or_moved_with(
    tmp_path: Path,
    asked: str,
    conflict: conflicts.Conflict,
    kinds: tuple[PassKind, ...],
    from_table: bool,
) -> None:
    """Neither by a flag, nor by a table that has such passes."""
    value = {"cuda_graph_impl": "transformer_engine"}.get(conflict.argument, True)
    args = parsed("--pipeline-schedule v-half", **{conflict.argument: value})
    conflicts.check_states(args)
    table = None
    if from_table:
        path = table_of(tmp_path / "states.csv", kinds)
        args = parsed(f"--pipeline-schedule-file {path}", **{conflict.argument: value})
        table = interchange.from_csv(path)
        asked = f"--pipeline-schedule-file {path}"
    else:
        args = parsed(f"--pipeline-schedule v-half {asked}", **{conflict.argument: value})
    with pytest.raises(
        UsageError, match=f"{conflict.flag}.* cannot be combined with {re.escape(asked)}"
    ):
        conflicts.check_states(args, table)


OWN_STATES = [
    (asked, own, kinds)
    for asked, _, kinds in STATES
    for own in run_flags.NOT_WITH_STATES
    if asked.split()[0] in own.states
]


@pytest.mark.parametrize("check", [run_flags.check_states, conflicts.check_states])
@pytest.mark.parametrize("from_table", [False, True])
@pytest.mark.parametrize(
    ("asked", "own", "kinds"), OWN_STATES, ids=lambda value: getattr(value, "argument", None)
)
def test_what_of_a_run_is_not_had_with_states(
    tmp_path: Path,
    asked: str,
    own: run_flags.NotWithStates,
    kinds: tuple[PassKind, ...],
    from_table: bool,
    check: Callable[..., None],
) -> None:
    """Megatron-LM's start and our own training refuse it with the same sentence."""
    given = {own.argument: own.value or "given"}
    path = table_of(tmp_path / "states.csv", kinds)
    table = interchange.from_csv(path) if from_table else None
    states = f"--pipeline-schedule-file {path}" if from_table else f"v-half {asked}"
    choice = states if from_table else f"--pipeline-schedule {states}"
    check(parsed(choice), table)
    flag = f"{flag_of(own.argument)} {own.value or 'given'}"
    with pytest.raises(UsageError) as raised:
        check(parsed(choice, **given), table)
    other = f"{choice}, which has " if from_table else asked
    assert str(raised.value).startswith(f"{flag} cannot be combined with {other}")
    assert str(raised.value).endswith(own.why)


@pytest.mark.parametrize(("asked", "known", "kinds"), STATES)
def test_a_table_that_drops_or_moves_says_so_itself(
    tmp_path: Path, asked: str, known: object, kinds: tuple[PassKind, ...]
) -> None:
    path = table_of(tmp_path / "states.csv", kinds)
    for flag in (asked, "--pipeline-host-limit 0.5"):
        with pytest.raises(UsageError, match=r"is a finished schedule: leave .* out"):
            adapter_of(parsed(f"--pipeline-schedule-file {path} {flag}"))
    with pytest.raises(UsageError, match=r"--fp8-format .* cannot be combined with"):
        adapter_of(parsed(f"--pipeline-schedule-file {path}", fp8="hybrid"))


@pytest.mark.parametrize("conflict", conflicts.GRAPH_CONFLICTS, ids=lambda c: c.argument)
def test_what_cuda_graphs_cannot_be_had_with(conflict: conflicts.Conflict) -> None:
    line = "--pipeline-schedule zb-h1"
    sizes = {"optimizer": "adam", "rerun_mode": "disabled"}
    args = parsed(line, cuda_graph_impl="transformer_engine", **sizes)
    adapter_of(args)
    setattr(args, conflict.argument, "9")
    with pytest.raises(UsageError) as refused:
        adapter_of(args)
    said = "cannot be combined with CUDA graphs (transformer_engine)"
    assert str(refused.value) == f"{conflict.flag} 9 {said}: {conflict.why}"


@pytest.mark.parametrize(
    ("stock", "why"),
    [
        ({"cuda_graph_impl": "local"}, graphs.WHY_NOT_LOCAL),
        ({"enable_cuda_graph": True}, graphs.WHY_NOT_LOCAL),
        (
            {"cuda_graph_impl": "full_iteration", "cuda_graph_warmup_steps": 0},
            graphs.WHY_A_STEP_BEFORE,
        ),
    ],
)
def test_cuda_graphs_that_would_be_wrong(stock: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed("--pipeline-schedule zb-h1", **stock))
    kind = stock.get("cuda_graph_impl", "local")
    assert str(refused.value) == (
        f"CUDA graphs ({kind}) cannot be combined with --pipeline-schedule zb-h1: {why}"
    )


def test_a_schedule_that_graphs_keep_to_is_not_measured() -> None:
    """Megatron's ``auto`` would be built anew for what is measured."""
    line = "--pipeline-schedule auto --pipeline-random-streams rank"
    for kind, measured in (("none", True), ("full_iteration", False)):
        adapter = adapter_of(parsed(line, cuda_graph_impl=kind))
        assert (ProfilePart in adapter._parts) == measured


@pytest.mark.parametrize(
    ("stock", "flag"),
    [
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, "--fp8-recipe delayed"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
        ({"moe_paged_stash": True}, "--moe-paged-stash"),
    ],
)
def test_a_step_that_cannot_run_twice_is_not_verified(stock: dict[str, Any], flag: str) -> None:
    adapter_of(parsed("--pipeline-schedule v-half", **stock))
    with pytest.raises(UsageError, match=f"^{flag} cannot be combined with --pipeline-verify: "):
        adapter_of(parsed("--pipeline-schedule v-half --pipeline-verify", **stock))
    adapter_of(parsed("--pipeline-schedule v-half --pipeline-verify", fp8_recipe="delayed"))
