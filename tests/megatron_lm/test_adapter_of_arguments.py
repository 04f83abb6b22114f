"""From Megatron-LM's arguments to an adapter, or to one sentence that says why not."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import measured_runs
import pytest
from megatron_arguments import parsed

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.settings import MEGATRON_LM, check_unscheduled
from megatron_zb.measured.profile import write_profile
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.adapter_of_arguments import (
    adapter_of,
    with_derived,
    without_bulk_overlap,
)
from megatron_zb.schedules import interchange, simulate
from megatron_zb.schedules.passes import Pass, PassKind
from megatron_zb.schedules.placement import looped, v_shape


def layout_of(line: str, **upstream: Any) -> str:
    args = parsed(line, **upstream)
    adapter_of(args)
    layout = args.pipeline_model_parallel_layout
    assert isinstance(layout, str)
    return layout


def test_a_decoder_beside_an_encoder_is_divided_by_megatron() -> None:
    numbers = {"num_layers": None, "encoder_num_layers": 3, "decoder_num_layers": 8}
    args = parsed("--pipeline-schedule zb-h1", **numbers)
    assert str(adapter_of(args).layer_layout) == "Ett|tt|tt|ttL"
    assert args.pipeline_model_parallel_layout is None
    for line in ("v-half", "zb-h1 --pipeline-layer-layout auto"):
        with pytest.raises(UsageError, match="with --decoder-num-layers, Megatron-LM compares"):
            adapter_of(parsed(f"--pipeline-schedule {line}", vocab_size=64, **numbers))


def test_without_a_schedule_nothing_changes() -> None:
    args = parsed()
    before = vars(args).copy()
    check_unscheduled(args, MEGATRON_LM)
    assert vars(args) == before


@pytest.mark.parametrize("name", [name for name in schedules.names() if name != "auto"])
def test_every_schedule_has_an_adapter(name: str) -> None:
    args = parsed(f"--pipeline-schedule {name}")
    adapter = adapter_of(args)
    assert adapter.schedule.name == name
    assert args.pipeline_model_parallel_layout == str(adapter.layer_layout)
    assert str(adapter.layer_layout).count("|") == 4 * adapter.chunks - 1
    assert str(adapter.layer_layout).count("t") == 16


def test_auto_has_an_adapter_within_its_limit() -> None:
    adapter = adapter_of(parsed("--pipeline-schedule auto --pipeline-memory-limit 0.75"))
    costs = schedules.Costs.uniform(pipeline_size=4, forward=1, backward=1, weight=1)
    assert max(schedules.simulate(adapter.schedule, costs).peak_memory) <= 0.75 * 4


def test_auto_can_be_bound_to_a_placement() -> None:
    for kind, expected in (("loop", looped(4, 2)), ("zigzag", v_shape(4))):
        line = f"--pipeline-schedule auto --pipeline-placement {kind}"
        adapter = adapter_of(parsed(line, num_virtual_stages_per_pipeline_rank=2))
        assert adapter.schedule.placement == expected
    adapter = adapter_of(parsed("--pipeline-schedule auto", num_virtual_stages_per_pipeline_rank=1))
    assert adapter.schedule.placement == looped(4)


def test_a_builder_is_asked_for_the_schedule_and_for_other_numbers_of_microbatches() -> None:
    asked: list[tuple[str, int]] = []

    def build(name: str, **request: Any) -> schedules.Schedule:
        asked.append((name, request["num_microbatches"]))
        return schedules.build(name, **request)

    adapter = adapter_of(parsed("--pipeline-schedule zb-h1"), build)
    adapter.current.program_for(3, True, False)
    adapter.current.program_for(8, False, False)
    assert asked == [("zb-h1", 8), ("zb-h1", 3)]


def test_megatrons_own_division_of_layers_is_replaced() -> None:
    args = parsed(
        "--pipeline-schedule v-half",
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
        num_virtual_stages_per_pipeline_rank=2,
    )
    adapter_of(args)
    assert args.account_for_embedding_in_pipeline_split is False
    assert args.account_for_loss_in_pipeline_split is False
    assert args.num_virtual_stages_per_pipeline_rank is None
    assert args.pipeline_model_parallel_layout == "Et|ttt|ttt|tt|tt|tt|tt|tL"


@pytest.mark.parametrize(
    ("line", "upstream", "layout"),
    [
        ("v-half", {}, "Ett|tt|tt|tt|tt|tt|tt|ttL"),
        ("v-half", {"num_layers": 17}, "Ett|ttt|tt|tt|tt|tt|tt|ttL"),
        ("zb-h1", {"num_layers": 10}, "Ett|ttt|ttt|ttL"),
        ("zb-h1", {"num_layers": None, "encoder_num_layers": 4}, "Et|t|t|tL"),
        ("zb-h1", {"mtp_num_layers": 1}, "Etttt|tttt|tttt|ttttmL"),
        ("zb-h1", {"decoder_first_pipeline_num_layers": 1}, "Et|ttttt|ttttt|tttttL"),
        (
            "zb-h1",
            {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
            "Et|tttttt|tttttt|tttL",
        ),
        (
            "v-half",
            {"pipeline_model_parallel_layout": "Ettt|(tt|)*6tL"},
            "Ettt|tt|tt|tt|tt|tt|tt|tL",
        ),
        # a vocabulary of 128 hidden sizes counts for ten layers, one of 4 for a third
        ("v-half --pipeline-layer-layout auto", {"vocab_size": 8192}, "E|ttt|ttt|ttt|tt|tt|ttt|L"),
        ("zb-h1 --pipeline-layer-layout auto", {"vocab_size": 256}, "Etttt|tttt|tttt|ttttL"),
        ("wave", {"num_virtual_stages_per_pipeline_rank": 2}, "Ett|tt|tt|tt|tt|tt|tt|ttL"),
        ("interleaved", {"num_layers_per_virtual_pipeline_stage": 2}, "Ett|tt|tt|tt|tt|tt|tt|ttL"),
    ],
)
def test_layers_go_where_they_are_asked_to_go(
    line: str, upstream: dict[str, Any], layout: str
) -> None:
    assert layout_of(f"--pipeline-schedule {line}", **upstream) == layout


@pytest.mark.parametrize(
    ("world_size", "upstream", "microbatches"),
    [
        (4, {}, 8),
        (8, {}, 4),
        (8, {"tensor_model_parallel_size": 2}, 8),
        (8, {"context_parallel_size": 2}, 8),
        (8, {"micro_batch_size": 2}, 2),
        (4, {"global_batch_size": None}, 1),
    ],
)
def test_microbatches_are_those_of_one_replica(
    world_size: int, upstream: dict[str, Any], microbatches: int
) -> None:
    adapter = adapter_of(parsed("--pipeline-schedule 1f1b", world_size=world_size, **upstream))
    assert adapter.schedule.num_microbatches == microbatches


def test_groups_are_for_schedules_that_have_the_choice() -> None:
    for name in ("interleaved", "v-half"):
        line = f"--pipeline-schedule {name}"
        adapter_of(parsed(line, microbatch_group_size_per_vp_stage=8))


ENDS = "count the layers of a rank, which holds several chunks here"


@pytest.mark.parametrize(
    ("line", "upstream", "words"),
    [
        ("--pipeline-schedule v-haf", {}, "unknown pipeline schedule 'v-haf': did you mean v-half"),
        ("--pipeline-schedule pipefusion", {}, "pipefusion is forward-only"),
        ("--pipeline-schedule v-half --pipeline-memory-limit 0.1", {}, "0.1 of 1F1B"),
        ("--pipeline-schedule v-half --pipeline-memory-limit -1", {}, "memory limit -1"),
        ("--pipeline-schedule v-half --pipeline-timeout -1", {}, "--pipeline-timeout is -1"),
        (
            "--pipeline-schedule v-half",
            {"num_virtual_stages_per_pipeline_rank": 4},
            "--num-virtual-stages-per-pipeline-rank asks for 4 chunks per pipeline rank, but "
            "--pipeline-schedule v-half has 2",
        ),
        (
            "--pipeline-schedule zb-h1",
            {"num_layers_per_virtual_pipeline_stage": 2},
            "--num-layers-per-virtual-pipeline-stage asks for 2 chunks",
        ),
        (
            "--pipeline-schedule interleaved",
            {"num_layers_per_virtual_pipeline_stage": 3},
            "--num-layers-per-virtual-pipeline-stage 3 does not divide the 16 layers of 4",
        ),
        (
            "--pipeline-schedule interleaved",
            {"num_layers_per_virtual_pipeline_stage": 0},
            "--num-layers-per-virtual-pipeline-stage is 0: it must be 1 or greater",
        ),
        ("--pipeline-schedule v-half", {"num_layers": 7}, "7 layers cannot be placed on 8 stages"),
        ("--pipeline-schedule v-half", {"num_layers": None}, "--num-layers is missing"),
        (
            "--pipeline-schedule v-half --pipeline-layer-layout E|t",
            {},
            "--pipeline-layer-layout is 'E|t': give auto or a .yaml file of --pipeline-profile",
        ),
        ("--pipeline-schedule v-half --pipeline-layer-layout no.yaml", {}, "no.yaml"),
        (
            "--pipeline-schedule v-half --pipeline-layer-layout auto",
            {},
            "has to know how large layers and the output layer are: give --hidden-size",
        ),
        (
            "--pipeline-schedule v-half --pipeline-layer-layout auto",
            {"vocab_size": 64, "multi_latent_attention": True},
            "cannot count multi-latent attention",
        ),
        (
            "--pipeline-schedule zb-h1 --pipeline-layer-layout auto",
            {"vocab_size": 64, "account_for_loss_in_pipeline_split": True},
            "and --account-for-loss-in-pipeline-split both say which layers a stage has",
        ),
        (
            "--pipeline-schedule zb-h1 --pipeline-layer-layout auto",
            {"vocab_size": 64, "pipeline_model_parallel_layout": "Et|t|t|tL"},
            "and --pipeline-model-parallel-layout both say which layers a stage has",
        ),
        ("--pipeline-schedule v-half", {"micro_batch_size": None}, "--micro-batch-size is missing"),
        ("--pipeline-schedule v-half", {"micro_batch_size": 0}, "--micro-batch-size is 0"),
        (
            "--pipeline-schedule v-half",
            {"tensor_model_parallel_size": 0},
            "--tensor-model-parallel-size is 0",
        ),
        (
            "--pipeline-schedule v-half",
            {"pipeline_model_parallel_size": 1},
            "needs a pipeline: give --pipeline-model-parallel-size",
        ),
        (
            "--pipeline-schedule v-half",
            {"pipeline_model_parallel_layout": "Ettt|tttt|tttt|ttttL"},
            "it names 4 stages and the schedule has 8",
        ),
        (
            "--pipeline-schedule zb-h1",
            {"pipeline_model_parallel_layout": "Et|t|t|tL"},
            "it names 4 layers and the model has 16",
        ),
        (
            "--pipeline-schedule zb-h1",
            {"pipeline_model_parallel_layout": "Ex|tL"},
            "use E, t, m, L and |",
        ),
        ("--pipeline-schedule v-half", {"decoder_first_pipeline_num_layers": 2}, ENDS),
        ("--pipeline-schedule v-min", {"decoder_last_pipeline_num_layers": 2}, ENDS),
        (
            "--pipeline-schedule wave",
            {"decoder_last_pipeline_num_layers": 2, "num_virtual_stages_per_pipeline_rank": 2},
            ENDS,
        ),
        (
            "--pipeline-schedule zb-h1",
            {"decoder_first_pipeline_num_layers": 15},
            "16 layers cannot be placed on 4 stages with at least one on each and 15 on the first",
        ),
        ("--pipeline-schedule-file nowhere.csv", {}, "nowhere.csv"),
        (
            "--pipeline-schedule v-half --pipeline-schedule-file x.csv",
            {},
            "--pipeline-schedule and --pipeline-schedule-file both choose a schedule",
        ),
        (
            "--pipeline-schedule v-half --pipeline-placement loop",
            {},
            "--pipeline-placement is for --pipeline-schedule auto: v-half has its own",
        ),
        (
            "--pipeline-schedule auto --pipeline-placement loop",
            {},
            "--pipeline-placement loop needs --num-virtual-stages-per-pipeline-rank, such as 2",
        ),
        (
            "--pipeline-schedule auto --pipeline-placement zigzag",
            {"num_virtual_stages_per_pipeline_rank": 0},
            "0 model chunks per rank were asked for",
        ),
        (
            "--pipeline-schedule-file x.csv --pipeline-schedule-cache x",
            {},
            "--pipeline-schedule-file is a finished schedule: leave --pipeline-schedule-cache out",
        ),
        (
            "--pipeline-schedule-file x.csv --pipeline-memory-limit 1",
            {},
            "--pipeline-schedule-file is a finished schedule: leave --pipeline-memory-limit out",
        ),
    ],
)
def test_what_cannot_be_had_is_one_sentence(
    line: str, upstream: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed(line, **upstream))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "v-half.csv"
    schedule = schedules.build("v-half", pipeline_size=4, num_microbatches=8)
    interchange.write_csv(schedule, path)
    return path


def test_a_schedule_from_a_file(table: Path) -> None:
    args = parsed(f"--pipeline-schedule-file {table}", num_virtual_stages_per_pipeline_rank=2)
    adapter = adapter_of(args)
    assert adapter.physical.mirrored
    built = schedules.build("v-half", pipeline_size=4, num_microbatches=8)
    assert adapter.schedule.ranks == built.ranks
    assert args.pipeline_model_parallel_layout == "Ett|tt|tt|tt|tt|tt|tt|ttL"


@pytest.mark.parametrize(
    ("upstream", "words"),
    [
        ({"global_batch_size": 16}, "is for 4 pipeline ranks and 8 microbatches, but the job has"),
        ({"pipeline_model_parallel_size": 2}, "the job has 2 and 4"),
        ({"num_layers": 7}, "7 layers cannot be placed on 8 stages"),
        (
            {"num_virtual_stages_per_pipeline_rank": 3},
            "--num-virtual-stages-per-pipeline-rank asks for 3 chunks per pipeline rank, but "
            "--pipeline-schedule-file",
        ),
        ({"decoder_first_pipeline_num_layers": 2}, ENDS),
        ({"ckpt_format": "torch", "load": "here"}, "--ckpt-format torch cannot be combined"),
    ],
)
def test_a_file_that_does_not_fit_the_job(
    table: Path, upstream: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError) as refused:
        adapter_of(parsed(f"--pipeline-schedule-file {table}", **upstream))
    assert words in str(refused.value)


def test_a_file_may_move_activations_to_the_host(tmp_path: Path) -> None:
    path = tmp_path / "moves.csv"
    schedule = schedules.build("1f1b", pipeline_size=4, num_microbatches=8)
    first, *others = schedule.ranks
    unit = (0, 3)
    at = first.index(Pass(PassKind.BW, *unit))
    moved = (*first[:at], Pass(PassKind.D, *unit), Pass(PassKind.H, *unit), *first[at:])
    interchange.write_csv(replace(schedule, ranks=(moved, *others)).validate(), path)
    adapter = adapter_of(parsed(f"--pipeline-schedule-file {path}"))
    assert adapter.schedule.offloaded == {unit}
    assert "  1 of 32 activations move to the host and back\n" in adapter.describe() + "\n"


@pytest.mark.slow
def test_activations_move_under_a_limit_where_that_is_faster() -> None:
    flags = "--pipeline-schedule v-half --pipeline-memory-limit 0.4"
    kept = adapter_of(parsed(flags))
    adapter = adapter_of(parsed(f"{flags} --pipeline-offload auto"))
    assert adapter.schedule.offloaded
    assert adapter.predicted_bubble_rate < kept.predicted_bubble_rate
    assert f"  {len(adapter.schedule.offloaded)} of 64 activations move to the host" in (
        adapter.describe()
    )
    assert "; a copy counts as " in adapter.describe()


@pytest.mark.full
def test_the_host_has_a_limit() -> None:
    flags = "--pipeline-schedule v-half --pipeline-memory-limit 0.4 --pipeline-offload auto"
    free = adapter_of(parsed(flags))
    limited = adapter_of(parsed(f"{flags} --pipeline-host-limit 0.125"))
    peaks = [max(simulate(a.schedule, a.costs).peak_host) for a in (free, limited)]
    assert peaks[0] > 0.5 >= peaks[1]
    with pytest.raises(UsageError, match="that move to the host: add --pipeline-offload auto"):
        adapter_of(parsed("--pipeline-schedule v-half --pipeline-host-limit 0.25"))


@pytest.mark.slow
def test_a_limit_in_bytes_needs_a_profile(tmp_path: Path) -> None:
    """The profile has 200 bytes for each of 8 stages, and what the output layer holds."""
    path = tmp_path / "run.yaml"
    write_profile(measured_runs.profile(output=0.0), path)
    flags = "--pipeline-schedule auto --pipeline-memory-limit"
    profiled = f"--pipeline-layer-layout {path}"
    share = adapter_of(parsed(f"{flags} 0.625 {profiled}", seq_length=32))
    in_bytes = adapter_of(parsed(f"{flags} 1KB {profiled}", seq_length=32))
    assert share.schedule.ranks == in_bytes.schedule.ranks
    twice = adapter_of(
        parsed(f"{flags} 2KB {profiled}", seq_length=32, micro_batch_size=2, global_batch_size=16)
    )
    assert share.schedule.ranks == twice.schedule.ranks
    with pytest.raises(UsageError, match="--pipeline-memory-limit 1KB is in bytes, and only"):
        adapter_of(parsed(f"{flags} 1KB"))


@pytest.mark.parametrize("name", versions.HYBRID_PATTERNS)
@pytest.mark.parametrize(
    ("schedule", "pattern", "placed"),
    [
        ("zb-h1", "M*-ME*-M", "M*|-M|E*|-M"),
        ("zb-h1", "M*-ME|*||-M/M*/M*", "M*-ME|*||-M/M*/M*"),
        ("v-half", "M*-ME*-M", "M|*|-|M|E|*|-|M"),
        ("v-half", "M*-ME*-MEE/M*", "M|*-|ME|*|-|M|E|E/M*"),
        ("v-half", "M|*-|M||E|*|-|M", "M|*-|M||E|*|-|M"),
        ("interleaved", "M*-ME*-M", "M|*|-|M|E|*|-|M"),
        ("interleaved", "M|*|-|M|E|*|-|M|" + "E|" * 3 + "E", "M|*|-|M|E|*|-|M|E|E|E|E"),
        ("auto", "M|*-|M||E|*|-|M", "M|*-|M||E|*|-|M"),
    ],
)
def test_a_hybrid_pattern_says_the_layers_of_each_stage(
    name: str,
    schedule: str,
    pattern: str,
    placed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "core_series", lambda: (0, 17))
    upstream = {"hybrid_layer_pattern": None, "num_layers": None, name: pattern}
    args = parsed(f"--pipeline-schedule {schedule}", **upstream)
    adapter = adapter_of(args)
    main = placed.split("/")[0]
    assert [letters.count("t") for letters in adapter.layer_layout.letters] == [
        len(segment) for segment in main.split("|")
    ]
    assert adapter.layer_layout.letters[-1].count("m") == placed.count("/")
    assert args.hybrid_layer_pattern == placed
    assert args.hybrid_override_pattern is None
    assert args.pipeline_model_parallel_layout is None
    assert args.num_virtual_stages_per_pipeline_rank is None


@pytest.mark.skipif(
    not metadata.version("megatron-core").startswith("0.16."), reason="of megatron-core 0.16"
)
def test_a_hybrid_pattern_of_megatron_0_16_keeps_its_own_placement() -> None:
    upstream = {"hybrid_override_pattern": "M*-M" * 4, "num_layers": None}
    args = parsed("--pipeline-schedule zb-h1", **upstream)
    adapter_of(args)
    assert args.hybrid_override_pattern == "M*-M" * 4
    assert args.pipeline_model_parallel_layout is None
    for schedule in ("v-half", "interleaved"):
        with pytest.raises(UsageError, match=r"--hybrid-override-pattern .* cannot be combined"):
            adapter_of(parsed(f"--pipeline-schedule {schedule}", **upstream))


@pytest.mark.parametrize(
    ("line", "upstream", "words"),
    [
        ("v-half", {"hybrid_layer_pattern": "M*|-M|M*|-M"}, "it has 4 segments ('|') and the"),
        ("zb-h1", {"hybrid_layer_pattern": "M*|-M|M*"}, "has 3 segments ('|') and the schedule"),
        ("interleaved", {"hybrid_layer_pattern": "M*|-M"}, "schedule has 8 stages: write as many"),
        (
            "v-half",
            {"hybrid_layer_pattern": "M*-M"},
            "4 layers cannot be placed on 8 stages with at least one on each",
        ),
        (
            "zb-h1",
            {"hybrid_layer_pattern": "M|*|-|M", "decoder_first_pipeline_num_layers": 1},
            "'|' in --hybrid-layer-pattern and --decoder-first-pipeline-num-layers both say which",
        ),
        (
            "zb-h1",
            {"hybrid_layer_pattern": "M*-M", "pipeline_model_parallel_layout": "Et|t|t|tL"},
            "--pipeline-model-parallel-layout cannot tell the layers of a hybrid model apart",
        ),
        (
            "v-half --enable-optimizer-post-validation",
            {"hybrid_layer_pattern": "M*-M" * 4 + "/M*/M*"},
            "--mtp-num-layers 2 cannot be combined with --enable-optimizer-post-validation",
        ),
        (
            "v-half --pipeline-layer-layout auto",
            {"hybrid_layer_pattern": "M*|-M|" * 3 + "M*|-M", "vocab_size": 64},
            "'|' in --hybrid-layer-pattern and --pipeline-layer-layout both say which",
        ),
        (
            "auto",
            {"hybrid_layer_pattern": "M*Q-" * 4},
            "no kind of layer is written 'Q': use *, +, -",
        ),
        ("auto", {"hybrid_layer_pattern": "M*-M" * 4 + "/Q"}, "no kind of layer is written 'Q'"),
        ("auto", {"hybrid_layer_pattern": "M*-M" * 4 + "/M/*"}, "the same layers after each '/'"),
        ("auto", {"hybrid_layer_pattern": "M*+-" * 4}, "* cannot be in a model with + or D"),
        ("auto", {"hybrid_layer_pattern": "M*-M|" * 4 + "M"}, "it has 5 segments ('|') and the"),
        ("v-min", {"hybrid_layer_pattern": "M*-"}, "write '|' between the stages in the pattern"),
    ],
)
def test_a_hybrid_pattern_that_cannot_be_placed(
    line: str, upstream: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "hybrid_letters", lambda series=None: sorted("*-EM+GD"))
    args = parsed(f"--pipeline-schedule {line}", num_layers=None, **upstream)
    with pytest.raises(UsageError) as refused:
        adapter_of(args, build=_no_search)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def _no_search(*_arguments: Any, **_options: Any) -> Any:
    raise AssertionError("a search has begun")


def test_a_pattern_that_ranks_do_not_divide_is_refused_where_megatron_divides_it() -> None:
    args = parsed("--pipeline-schedule zb-h1", num_layers=None, hybrid_override_pattern="M*-")
    with pytest.raises(UsageError, match="4 ranks do not divide its 3: add or remove layers"):
        adapter_of(args, build=_no_search)


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_letters_of_a_pattern_are_costs(schedule: str) -> None:
    """Stages of few experts and of much attention have as much to do."""
    line = f"--pipeline-schedule {schedule} --pipeline-layer-layout auto"
    model = {
        "hybrid_layer_pattern": "*" * 32 + "E" * 16,
        "num_layers": None,
        "vocab_size": 64,
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 2048,
    }
    args = parsed(line, **model)
    adapter = adapter_of(args)
    balance = adapter.placed.balance
    assert balance is not None and balance.gain > 0.2
    segments = args.hybrid_layer_pattern.split("|")
    assert "".join(segments) == model["hybrid_layer_pattern"]
    of_experts, of_attention = max(balance.ends.work), min(balance.ends.work)
    assert of_experts > 5 * of_attention
    ranks = [0.0] * 4
    for segment, rank in zip(segments, adapter.schedule.placement.rank_of, strict=True):
        ranks[rank] += segment.count("E") * of_experts + segment.count("*") * of_attention
    assert max(ranks) < 1.25 * sum(ranks) / 4


@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_measured_letters_of_a_pattern_are_costs(schedule: str, tmp_path: Path) -> None:
    """A file without them is refused."""
    path = tmp_path / "run.yaml"
    line = f"--pipeline-schedule {schedule} --pipeline-layer-layout {path}"
    model = {"num_layers": None, "seq_length": 32}
    write_profile(measured_runs.profile(), path)
    pattern = measured_runs.HYBRID
    with pytest.raises(UsageError, match="cannot tell the layers of a hybrid model apart: "):
        adapter_of(parsed(line, hybrid_layer_pattern=pattern, **model))
    write_profile(measured_runs.hybrid_profile(), path)
    args = parsed(line, hybrid_layer_pattern=pattern, **model)
    adapter = adapter_of(args)
    balance = adapter.placed.balance
    assert balance is not None and balance.gain > 0.15
    segments = args.hybrid_layer_pattern.split("|")
    assert "".join(segments) == pattern
    ranks = [0.0] * 4
    for segment, rank in zip(segments, adapter.schedule.placement.rank_of, strict=True):
        ranks[rank] += sum(measured_runs.TIMES_OF[letter] for letter in segment)
    assert max(ranks) <= 8, "an even share is 7"


def test_chunks_of_a_table_are_not_those_of_a_pattern(table: Path) -> None:
    args = parsed(f"--pipeline-schedule-file {table}", hybrid_layer_pattern="M|*|-|M")
    with pytest.raises(UsageError, match=r"'\|' in --hybrid-layer-pattern asks for 1 chunks"):
        adapter_of(args)


@pytest.mark.parametrize(
    ("line", "upstream", "by_layer"),
    [
        ("--pipeline-schedule v-half", {}, True),
        ("--pipeline-schedule v-half --pipeline-random-streams rank", {}, False),
        ("--pipeline-schedule interleaved", {}, True),
        ("--pipeline-schedule zb-h1", {}, False),
        ("--pipeline-schedule zb-h1 --pipeline-random-streams auto", {}, False),
        ("--pipeline-schedule zb-h1 --pipeline-random-streams layer", {}, True),
        ("--pipeline-schedule zb-h1", {"num_layers": 15}, True),
        (
            "--pipeline-schedule zb-h1",
            {"num_layers": 14, "decoder_first_pipeline_num_layers": 2},
            False,
        ),
        (
            "--pipeline-schedule zb-h1",
            {"pipeline_model_parallel_layout": "Ettttt|ttttt|tttt|ttL"},
            False,
        ),
        ("--pipeline-schedule zb-h1", {"hybrid_override_pattern": "MMM*" * 3}, False),
        ("--pipeline-schedule zb-h1", {"hybrid_layer_pattern": "MMM*" * 3}, False),
        ("--pipeline-schedule zb-h1", {"hybrid_layer_pattern": "MMM*" * 3 + "M"}, True),
        ("--pipeline-schedule v-half", {"hybrid_layer_pattern": "MMM*" * 3}, True),
    ],
)
def test_layers_that_move_draw_from_streams_of_their_own(
    line: str, upstream: dict[str, Any], by_layer: bool
) -> None:
    adapter = adapter_of(parsed(line, **upstream))
    assert adapter.draws_by_layer is by_layer
    assert ("separate RNG states" in adapter.describe()) is by_layer


@pytest.mark.parametrize(("schedule", "is_left"), [("v-half", False), ("1f1b", True)])
def test_an_overlap_with_weight_gradients_is_left_out_where_they_come_later(
    schedule: str, is_left: bool
) -> None:
    args = parsed(f"--pipeline-schedule {schedule}", tp_comm_overlap=True, tp_comm_bulk_wgrad=True)
    lines = without_bulk_overlap(args, adapter_of(args))
    assert args.tp_comm_bulk_wgrad == is_left
    assert len(lines) == (0 if is_left else 1)
    assert without_bulk_overlap(parsed(f"--pipeline-schedule {schedule}"), adapter_of(args)) == []


def test_sizes_are_those_that_megatron_lm_derives() -> None:
    args = parsed("", seq_length=None, encoder_seq_length=48, swiglu=True, num_layers=None)
    args.encoder_num_layers = 12
    found = with_derived(args)
    assert (found.seq_length, found.num_layers, found.ffn_hidden_size) == (48, 12, 128)
    assert (args.seq_length, args.num_layers, args.ffn_hidden_size) == (None, None, None)
    assert with_derived(parsed("")).ffn_hidden_size is None


@pytest.mark.parametrize("missing", ["hidden_size", "num_attention_heads", "seq_length"])
def test_a_schedule_needs_no_size_of_a_layer(missing: str) -> None:
    args = parsed("--pipeline-schedule v-half", vocab_size=128, **{missing: None})
    assert adapter_of(args).schedule.name == "v-half"


def test_offloading_needs_the_size_of_a_layer() -> None:
    args = parsed("--pipeline-schedule auto --pipeline-offload auto", hidden_size=None)
    with pytest.raises(UsageError, match="give --hidden-size"):
        adapter_of(args)
