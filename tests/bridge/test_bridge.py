"""Schedules in trainers that build their model and call Megatron's schedules themselves."""

from __future__ import annotations

import argparse
import pickle
import subprocess
import sys
from contextlib import redirect_stdout
from copy import copy
from dataclasses import replace
from io import StringIO
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from brief_searches import briefly
from found_on_ranks import same, whole
from ranks import RankPools

from megatron_zb.bridge import Settings, hybrid, install
from megatron_zb.bridge.pipeline import IMPORTER_MODULE
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import forward_backward as runtime
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.frozen_model import FrozenModel
from megatron_zb.schedules.passes import PassKind
from megatron_zb.schedules.request import Limit

FULL = pytest.mark.full
STEPS = [4, 6, 2]
"""Microbatches of each step."""


def actor(settings: bytes | None, args: Any) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What a process of a trainer finds in three steps, and its weights; see trainers.py."""
    import trainers
    from megatron.core.pipeline_parallel import get_forward_backward_func

    upstream = trainers.get_forward_backward_func
    pipeline = install(pickle.loads(settings), args) if settings else None
    process = trainers.Actor(args, pipeline.builder if pipeline else None)
    found: list[Any] = []
    for step, count in enumerate(STEPS):
        kept = trainers.weights_of(process.chunks)
        process.load(seed=2)  # a reference model, in the place of the trained one
        found.append(process.log_probs(step, count + 2))
        process.put_back(kept)
        found.append(process.log_probs(step, count, collect_non_loss_data=True))
        found.append(process.train_one_step(step, count))
    if pipeline:
        assert trainers.get_forward_backward_func is not upstream
        pipeline.uninstall()
    assert trainers.get_forward_backward_func is upstream
    assert get_forward_backward_func is upstream or pipeline
    return found, trainers.weights_of(process.models)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks_of_job", "pipeline_size", "tied", "names"),
    [
        (4, 2, True, ("v-half", "zb-h1")),
        pytest.param(4, 2, True, ("v-zb", "interleaved"), marks=FULL),
        pytest.param(4, 4, False, ("v-half", "v-zb", "zb-h1", "interleaved"), marks=FULL),
    ],
    ids=["tied", "tied-others", "four"],
)
def test_a_trainer_for_reinforcement_learning_trains_as_with_megatrons_schedule(
    ranks: RankPools, ranks_of_job: int, pipeline_size: int, tied: bool, names: tuple[str, ...]
) -> None:
    import trainers

    args = trainers.arguments(pipeline_size, tied=tied)
    job = ranks(ranks_of_job)
    losses, weights = whole(job.run(actor, settings=None, args=args))
    assert len(losses) == ranks_of_job // pipeline_size
    for name in names:
        settings = pickle.dumps(Settings(pipeline_schedule=name, num_microbatches=4))
        found = whole(job.run(actor, settings=settings, args=args))
        assert same(found[0], losses), name
        assert found[1].keys() == weights.keys()
        assert same(found[1], weights), name


@pytest.mark.slow
@pytest.mark.parametrize("adapters", ["before", pytest.param("after", marks=FULL)])
@pytest.mark.parametrize(
    ("ranks_of_job", "p", "names"),
    [(4, 2, ("v-half", "zb-h1")), pytest.param(4, 4, ("v-zb", "zb-h1"), marks=FULL)],
    ids=["two", "four"],
)
def test_adapters_beside_frozen_layers_train_as_with_megatrons_schedule(
    ranks: RankPools, ranks_of_job: int, p: int, names: tuple[str, ...], adapters: str
) -> None:
    import trainers

    job = ranks(ranks_of_job)
    args = trainers.arguments(p, adapters=adapters)
    losses, weights = whole(job.run(actor, settings=None, args=args))
    for name in names:
        settings = pickle.dumps(Settings(pipeline_schedule=name, num_microbatches=4))
        for overlap in (False, True):
            ours = trainers.arguments(p, adapters=adapters, overlap=overlap)
            found = whole(job.run(actor, settings=settings, args=ours))
            assert same(found[0], losses), (name, overlap)
            assert same(found[1], weights), (name, overlap)


def counted_with_adapters(adapters: str) -> tuple[list[float], str]:
    """Seconds of F, B and W of this rank once the first step has been counted, and what is said."""
    import trainers

    args = trainers.arguments(2, adapters=adapters)
    said = StringIO()
    settings = Settings(pipeline_schedule="zb-h1", num_microbatches=4)
    with redirect_stdout(said), install(settings, args) as pipeline:
        trainers.Actor(args, pipeline.builder).train_one_step(0, 4)
        costs = pipeline.adapter.costs
        return [
            costs.seconds[PassKind.F][0],
            costs.seconds[PassKind.B][0],
            costs.seconds[PassKind.W][0],
        ], said.getvalue()


@pytest.mark.long
def test_frozen_weights_take_no_time_in_w(ranks: RankPools) -> None:
    """A layer has 12,288 frozen numbers, and adapters 2,048, whose gradients W computes."""
    (seconds, said), _ = ranks(2).run(counted_with_adapters, adapters="before")
    assert seconds == pytest.approx([1.0, 1.0, 2048 / (2048 + 12288)], abs=1e-6)
    assert "frozen weights have no gradients, by their sizes 86% of stage 0, " in said
    assert "v-zb" not in said


def test_a_split_backward_of_frozen_layers_brings_little(ranks: RankPools) -> None:
    """Adapters that come after the layers were split leave W nothing at all."""
    (seconds, said), _ = ranks(2).run(counted_with_adapters, adapters="after")
    assert seconds == [1.0, 1.0, 0.0]
    assert "W is too short to fill it, but v-zb makes it shorter" in said


def provided(
    name: str | None,
    random_streams: str = "rank",
    vocabulary: str | None = None,
    models: int = 1,
    **more: Any,
) -> Any:
    """Losses and weights of a model that its own config provides, as in Megatron-Bridge.

    Of the last of so many ``models``; with ``more`` settings.
    """
    import trainers

    p = dist.get_world_size()
    provider = trainers.Provider(**trainers.OF_MODEL, num_layers=8, pipeline_model_parallel_size=p)
    if name is None:
        return trainers.pretrain(provider, steps=2)
    settings = Settings(
        pipeline_schedule=name,
        num_microbatches=4,
        pipeline_layer_layout="auto" if name == "v-half" else None,
        pipeline_random_streams=random_streams,
        pipeline_vocabulary=vocabulary,
        seed=1,
        **more,
    )
    with briefly(), install(settings, provider) as pipeline:
        schedule = pipeline.adapter.schedule
        states = [bool(units) for units in (schedule.recomputed, schedule.offloaded)]
        asked = ("pipeline_recompute", "pipeline_offload")
        assert states == [more.get(state) == "auto" for state in asked]
        pipeline.prepare_provider(provider)
        found = trainers.pretrain(provider, steps=2, models=models)
        assert pipeline.steps_done == 2
    return found


@pytest.mark.slow
def test_a_provider_of_megatron_bridges_shape_trains_as_with_megatrons_schedule(
    ranks: RankPools,
) -> None:
    job = ranks(2)
    losses, weights = whole(job.run(provided, name=None))
    assert len(losses) == 1
    for name, streams in (("v-half", "rank"), ("interleaved", "rank"), ("zb-h1", "layer")):
        found = whole(job.run(provided, name=name, random_streams=streams))
        assert same(found[0], losses), name
        assert same(found[1], weights), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "state", ["pipeline_recompute", pytest.param("pipeline_offload", marks=FULL)]
)
def test_a_provider_trains_with_recomputation_as_with_megatrons_schedule(
    ranks: RankPools, state: str
) -> None:
    more: dict[str, Any] = {state: "auto", "pipeline_memory_limit": 0.4}
    job = ranks(2)
    losses, weights = whole(job.run(provided, name=None))
    found = whole(job.run(provided, name="v-half", **more))
    assert same(found[0], losses)
    assert same(found[1], weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v-half", pytest.param("zb-h1", marks=FULL)])
def test_a_provider_trains_on_token_slices_to_megatrons_losses(ranks: RankPools, name: str) -> None:
    """But for the order of sums."""
    job = ranks(2)
    [expected], weights = whole(job.run(provided, name=None))
    [found], others = whole(job.run(provided, name=name, pipeline_slices=4))
    assert found == pytest.approx(expected, rel=2e-6)
    assert others.keys() == weights.keys()


@pytest.mark.parametrize(
    ("name", "vocabulary"), [("v-half", "on"), pytest.param("zb-h1", "on", marks=FULL)]
)
def test_a_provider_trains_with_a_sharded_vocabulary_to_megatrons_losses(
    ranks: RankPools, name: str, vocabulary: str
) -> None:
    """But for the order of sums."""
    job = ranks(2)
    [expected], _ = whole(job.run(provided, name=None))
    of_ranks = job.run(provided, name=name, vocabulary=vocabulary)
    [found] = [losses for losses, _ in of_ranks if losses]
    assert len(expected) == 8
    assert found == pytest.approx(expected, rel=2e-6)
    assert expected[4:] != pytest.approx(expected[:4], rel=1e-3)  # a step changes them
    for _, weights in of_ranks:
        assert weights["output_layer.weight"].size(0) == trainers_vocabulary() // 2


def trainers_vocabulary() -> int:
    import trainers

    return trainers.VOCABULARY


def a_second_model(vocabulary: str) -> str:
    try:
        provided("v-half", vocabulary=vocabulary, models=2)
    except UsageError as error:
        return str(error)
    return ""


def test_a_second_model_with_a_sharded_vocabulary_is_refused(ranks: RankPools) -> None:
    job = ranks(2)
    for text in job.run(a_second_model, vocabulary="on"):
        assert text.startswith("a second model was built, but the shards of the vocabulary are")
    assert job.run(a_second_model, vocabulary="off") == ["", ""]


def sent_layout() -> list[str]:
    """The layout of a config, itself and as another rank gets it from Megatron-Bridge.

    That copies what has attributes, three levels deep, assigns them anew, and pickles all.
    """
    import trainers

    p = dist.get_world_size()
    provider = trainers.Provider(**trainers.OF_MODEL, num_layers=8, pipeline_model_parallel_size=p)
    with install(V_HALF, provider):
        layout = provider.pipeline_model_parallel_layout
        return [str(layout), str(pickle.loads(pickle.dumps(_assigned_anew(layout, levels=2))))]


def _assigned_anew(value: Any, levels: int) -> Any:
    if not levels or not hasattr(value, "__dict__"):
        return value
    copied = copy(value)
    for name, held in vars(value).items():
        setattr(copied, name, _assigned_anew(held, levels - 1))
    return copied


def test_a_config_can_be_sent_to_other_ranks(ranks: RankPools) -> None:
    layout = "Ett|tt|tt|ttL"
    assert ranks(2).run(sent_layout) == [[layout, layout]] * 2


class Importer:
    """What Megatron-Bridge's importer does to a V: nothing has written what it copies."""

    def _broadcast_shared_embeddings(self, models: list[Any]) -> None:
        for weight in output_layers(models):
            weight.data.fill_(float("nan"))


def output_layers(models: list[Any]) -> list[Any]:
    named = [each for model in models for each in model.named_parameters()]
    return [weight for name, weight in named if name.endswith("output_layer.weight")]


def imported(name: str) -> list[str]:
    """What the output layer of this rank is after an import, and after one without a schedule."""
    import trainers

    args = trainers.arguments(dist.get_world_size(), tied=True)
    module: Any = ModuleType(IMPORTER_MODULE)
    module.MegatronModelBridge = Importer
    settings = Settings(pipeline_schedule=name, num_microbatches=4)
    with patch.dict(sys.modules, {IMPORTER_MODULE: module}), install(settings, args) as pipeline:
        models = trainers.Actor(args, pipeline.builder).models
        Importer()._broadcast_shared_embeddings(models)
        found = [_output_layer(models)]
    Importer()._broadcast_shared_embeddings(models)
    return [*found, _output_layer(models)]


def _output_layer(models: list[Any]) -> str:
    if not (outputs := output_layers(models)):
        return "elsewhere"
    if outputs[0].isnan().all():
        return "unwritten"
    named = [each for model in models for each in model.named_parameters()]
    [embedding] = [weight for name, weight in named if "word_embeddings" in name]
    return "tied" if torch.equal(outputs[0], embedding) else "other"


def test_an_importer_leaves_weights_tied_in_a_v(ranks: RankPools) -> None:
    """Only there, and while the schedule is installed; tests/trainers has the real importer."""
    job = ranks(2)
    assert job.run(imported, name="v-half") == [["elsewhere"] * 2, ["tied", "unwritten"]]
    assert job.run(imported, name="zb-h1") == [["elsewhere"] * 2, ["unwritten"] * 2]


# --- what is refused


V_HALF = Settings(pipeline_schedule="v-half", num_microbatches=4)


def refused(case: str) -> str:
    """What a process is told; the case names what it does wrong."""
    import trainers

    args = trainers.arguments(dist.get_world_size())
    pipeline = None
    try:
        settings = CHANGED if case == "settings" and dist.get_rank() else V_HALF
        pipeline = install(settings, args)
        with pytest.raises(UsageError, match="take it back before"):
            install(V_HALF, args)
        _misuse(case, args, pipeline, trainers)
    except UsageError as error:
        return str(error)
    finally:
        if pipeline is not None:
            pipeline._take_back()
    return "nothing is refused"


def _misuse(case: str, args: Any, pipeline: Any, trainers: Any) -> None:
    if case == "another size":
        args.pipeline_model_parallel_size = 1
    elif case == "config":
        args.pipeline_model_parallel_layout = args.virtual_pipeline_model_parallel_size = None
    elif case == "builder":
        trainers.Actor(args).train_one_step(0, 4)
    process = trainers.Actor(args, pipeline.builder)
    if case == "schedule taken back":
        pipeline.uninstall()
        if dist.get_rank() == 0:  # the other would wait for its first message
            process.train_one_step(0, 4)
        process.models[0](None, None, None)
    elif case == "after an exception":
        with patch.object(runtime, "run_program", side_effect=KeyError), pytest.raises(KeyError):
            process.train_one_step(0, 4)
        process.models[0](None, None, None)
    elif case == "late":
        pipeline.uninstall()
        install(V_HALF, trainers.arguments(dist.get_world_size()))
    elif case == "fsdp":
        kind = type("FullyShardedDataParallel", (type(process.models[0]),), {})
        process.models[0].__class__ = kind
        process.train_one_step(0, 4)


CHANGED = Settings(pipeline_schedule="v-half", num_microbatches=4, pipeline_memory_limit=0.9)
REFUSED = {
    "settings": "the ranks were started with different arguments: no --pipeline-memory-limit on "
    "rank 0, but --pipeline-memory-limit 0.9 on rank 1; start every rank with the same",
    "another size": "initialize_model_parallel has the pipeline_model_parallel_size 1, but the "
    "schedule was installed for 2",
    "config": "the model was built with the layer layout None, not with that of the schedule, "
    "Et|t|t|tL: prepare its config before it is built",
    "builder": "the pipeline schedule v-half runs the 2 chunks of a model whose builder was "
    "wrapped: wrap the builder of every model of this process, or take the schedule back",
    "schedule taken back": "a chunk of the pipeline schedule v-half was run by something else, "
    "which has its stages in another order: run it with what get_forward_backward_func() returns "
    "while the schedule is installed",
    "after an exception": "a chunk of the pipeline schedule v-half was run by something else, "
    "which has its stages in another order: run it with what get_forward_backward_func() returns "
    "while the schedule is installed",
    "late": "the schedule was installed after initialize_model_parallel, which has to know of it: "
    "install it before",
    "fsdp": "--use-megatron-fsdp cannot be combined with the pipeline schedule v-half: it "
    "reduces gradients in backward hooks, before W has computed them",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_run_another_schedule_is_refused(ranks: RankPools, case: str) -> None:
    assert set(ranks(2).run(refused, case=case)) == {REFUSED[case]}


def test_settings_say_what_is_wrong_with_them() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "give one of pipeline_schedule and pipeline_schedule_file: a name, such as v-half"),
        ({"pipeline_schedule": "v-hal"}, "unknown pipeline schedule 'v-hal': did you mean v-half"),
        ({"pipeline_schedule": "v-zb", "num_microbatches": 0}, "num_microbatches is 0: it must"),
        (
            {"pipeline_schedule": "v-zb", "pipeline_random_streams": "stage"},
            "pipeline_random_streams is 'stage': give rank or layer",
        ),
        (
            {"pipeline_schedule": "v-zb", "pipeline_vocabulary": "yes"},
            "pipeline_vocabulary is 'yes': give auto or on or off",
        ),
        (
            {"pipeline_schedule": "v-zb", "pipeline_offload": "yes"},
            "pipeline_offload is 'yes': give auto or on or off",
        ),
        (
            {"pipeline_schedule": "v-zb", "pipeline_memory_limit": "40 apples"},
            "pipeline_memory_limit is '40 apples': give a fraction of 1F1B's, such as 0.5, or",
        ),
        (
            {"pipeline_schedule": "v-zb", "pipeline_schedule_cache": "folder"},
            "pipeline_schedule_cache is a setting of command lines: leave it out",
        ),
    ]
    for given, expected in wrong:
        with pytest.raises(UsageError) as found:
            Settings(**{"num_microbatches": 4, **given})
        assert str(found.value).startswith(expected)
    never = Settings(num_microbatches=4, pipeline_schedule="v-zb")
    assert never.pipeline_timeout == 0, "a trainer may pause for as long as it likes"
    for limit in (0.5, "0.5", "40GiB", Limit(0.5)):
        settings = Settings(
            num_microbatches=4, pipeline_schedule="auto", pipeline_memory_limit=limit
        )
        assert pickle.loads(pickle.dumps(settings)) == settings
        assert isinstance(settings.pipeline_memory_limit, Limit)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_layers": None}, "num_layers is missing in the Namespace of the model"),
        (
            {"pipeline_schedule": "v-half"},
            "--pipeline-schedule v-half is among the arguments, but what was planned for it stays "
            "in the process that has checked them: leave it out, and give it to the settings",
        ),
        (
            {"fine_grained_activation_offloading": True},
            "--fine-grained-activation-offloading cannot be combined with --pipeline-schedule "
            "v-half: it assumes the order of Megatron's interleaved schedule; give "
            "--pipeline-offload auto instead",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 4},
            "--num-virtual-stages-per-pipeline-rank asks for 4 chunks per pipeline rank, but "
            "--pipeline-schedule v-half has 2: leave --num-virtual-stages-per-pipeline-rank out",
        ),
    ],
)
def test_a_model_that_cannot_be_served_is_refused(changes: dict[str, Any], expected: str) -> None:
    model = argparse.Namespace(num_layers=8, pipeline_model_parallel_size=2)
    vars(model).update(changes)
    with pytest.raises(UsageError) as found:
        install(V_HALF, model)
    assert str(found.value) == expected


def test_a_hybrid_model_needs_the_function_that_places_its_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(versions, "hybrid_segments", list)
    model = argparse.Namespace(hybrid_layer_pattern="*-*-", pipeline_model_parallel_size=2)
    with pytest.raises(UsageError, match=r"'\*-\*-' needs megatron-core 0.17 or newer"):
        install(V_HALF, model)


@pytest.mark.parametrize(
    ("attributes", "pattern"),
    [
        ({"num_layers": 4}, None),
        ({"hybrid_layer_pattern": "*-M-"}, "*-M-"),
        ({"hybrid_override_pattern": "*-M-", "hybrid_layer_pattern": None}, "*-M-"),
        (
            {
                "hybrid_layer_pattern": "*-",
                "mtp_hybrid_override_pattern": "*E",
                "mtp_num_layers": 2,
            },
            "*-/*E/*E",
        ),
        (
            {
                "hybrid_layer_pattern": "*-/*E",
                "mtp_hybrid_override_pattern": "*E",
                "mtp_num_layers": 1,
            },
            "*-/*E",
        ),
        (
            {
                "hybrid_layer_pattern": "*-",
                "mtp_hybrid_override_pattern": "*E",
                "mtp_num_layers": None,
            },
            "*-",
        ),
    ],
)
def test_the_pattern_of_a_provider_has_its_predicted_layers(
    attributes: dict[str, Any], pattern: str | None
) -> None:
    assert hybrid.pattern_of(argparse.Namespace(**attributes)) == pattern


def test_a_provider_without_virtual_stages_builds_chunks() -> None:
    """It restores what it has changed, also where building fails."""
    built: list[Any] = []

    class Provider:
        virtual_pipeline_model_parallel_size: int | None = 2

    provider = Provider()

    def model(**given: Any) -> Any:
        assert provider.virtual_pipeline_model_parallel_size == 2
        built.append(given)
        if given["config"] == "wrong":
            raise ValueError("wrong")
        return given

    source = (
        "def provide(config, vp_stage=None):\n"
        "    assert provider.virtual_pipeline_model_parallel_size is None and vp_stage is None\n"
        "    return MCoreHybridModel(config=config)\n"
    )
    names: dict[str, Any] = {"MCoreHybridModel": model, "provider": provider}
    exec(source, names)  # whose globals are those of a provider's module
    build = hybrid.by_chunks(provider, names["provide"])
    assert build("a config", vp_stage=1) == {"config": "a config", "vp_stage": 1}
    with pytest.raises(ValueError, match="wrong"):
        build("wrong", vp_stage=0)
    assert names["MCoreHybridModel"] is model
    assert provider.virtual_pipeline_model_parallel_size == 2

    def other(config: Any, vp_stage: int | None = None) -> Any:
        return config, vp_stage

    assert hybrid.by_chunks(provider, other) is other


def prepared_divisions() -> dict[str, Any]:
    """The values that divide layers, from a config that sets all of them, prepared for v-half."""
    import trainers

    args = trainers.arguments(dist.get_world_size())
    pipeline = install(V_HALF, args)
    try:
        config = trainers.arguments(dist.get_world_size())
        for name in DIVISIONS:
            setattr(config, name, True if name.startswith("account") else 1)
        config.microbatch_group_size_per_vp_stage = 2
        pipeline.prepare(config)
        # verl and slime round the number of microbatches up to a multiple of it
        assert config.microbatch_group_size_per_vp_stage == 1
        return {name: getattr(config, name) for name in DIVISIONS}
    finally:
        pipeline._take_back()


# Every field of Megatron's configs and arguments that divides layers among ranks.
DIVISIONS = {
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
}


def divided_by_megatron(first: int | None, later: int | None) -> str:
    """What zb-h1 leaves of a config that gives the first rank some layers, or another ``later``."""
    import trainers

    args = trainers.arguments(dist.get_world_size())
    args.num_layers_in_first_pipeline_stage = first
    with install(Settings(pipeline_schedule="zb-h1", num_microbatches=4), args) as pipeline:
        assert args.pipeline_model_parallel_layout is None
        assert args.num_layers_in_first_pipeline_stage == first
        args.num_layers_in_first_pipeline_stage = later
        try:
            process = trainers.Actor(args, pipeline.builder)
        except UsageError as error:
            return str(error)
        process.train_one_step(0, 4)
        return "".join("t" for _ in process.chunks[0].decoder.layers)


@pytest.mark.parametrize("first", [None, 3])
def test_megatrons_own_division_stays_where_the_schedule_has_it(
    ranks: RankPools, first: int | None
) -> None:
    """Trainers such as slime and NeMo-RL refuse a layout, which nothing needs here."""
    found = ranks(2).run(divided_by_megatron, first=first, later=first)
    assert found == (["tt", "tt"] if first is None else ["ttt", "t"])


def test_a_model_that_is_divided_otherwise_is_refused(ranks: RankPools) -> None:
    first, _ = ranks(2).run(divided_by_megatron, first=None, later=3)
    assert first == (
        "on rank 0: the model was built with 3 layers, but the schedule was installed for 2 on "
        "this rank: prepare its config before it is built"
    )


def test_a_layout_takes_the_place_of_all_other_divisions(ranks: RankPools) -> None:
    assert ranks(2).run(prepared_divisions) == [DIVISIONS] * 2


def test_delayed_weight_gradients_are_left_to_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """As recipes for mixtures of experts turn them on, beside the overlap of their exchange."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    model = argparse.Namespace(
        num_layers=8,
        pipeline_model_parallel_size=2,
        overlap_moe_expert_parallel_comm=True,
        delay_wgrad_compute=True,
        expert_model_parallel_size=2,
        num_moe_experts=4,
        moe_token_dispatcher_type="alltoall",
        bf16=True,
    )
    with briefly(), install(V_HALF, model) as pipeline:
        assert not model.delay_wgrad_compute
        assert model.overlap_moe_expert_parallel_comm
        assert pipeline.adapter.schedule.pairs
        assert "--delay-wgrad-compute is left out: the schedule places" in (
            pipeline.adapter.describe()
        )


def test_no_vocabulary_is_sharded_beside_prediction_and_an_exchange_that_overlaps() -> None:
    model = argparse.Namespace(
        num_layers=8,
        pipeline_model_parallel_size=2,
        overlap_moe_expert_parallel_comm=True,
        mtp_num_layers=1,
    )
    with pytest.raises(UsageError) as found:
        install(replace(V_HALF, pipeline_vocabulary="on"), model)
    assert str(found.value) == (
        "--overlap-moe-expert-parallel-comm cannot be combined with --pipeline-vocabulary on: "
        "Megatron's plans run prediction layers and their output layer apart; leave one out"
    )


def test_settings_are_made_without_torch() -> None:
    code = "from megatron_zb.bridge import Settings; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def taught(args: Any, share: float | None) -> tuple[list[float], list[tuple[int, ...]]]:
    """Losses of a step, and the shapes of what a frozen model beside it has returned."""
    import trainers
    from megatron.core import parallel_state

    settings = Settings(pipeline_schedule="v-half", num_microbatches=4, teacher=share)
    plain, shapes = copy(args), list[tuple[int, ...]]()
    with install(settings, args) as pipeline:
        process = trainers.Actor(args, pipeline.builder)
        if share is not None:
            rank = parallel_state.get_pipeline_model_parallel_rank()
            is_last = rank == args.pipeline_model_parallel_size - 1
            chunk = trainers._build_chunk(plain, rank == 0, is_last).requires_grad_(False)

            def run(iterator: Any, chunk: Any) -> torch.Tensor:
                tokens = next(iterator)[:, :-1]
                positions = torch.arange(tokens.size(1)).expand(len(tokens), -1)
                output: torch.Tensor = chunk(tokens, positions, None)
                shapes.append(tuple(output.shape))
                return output

            pipeline.teach_with(FrozenModel(chunk, run))
        return process.train_one_step(0, 4), shapes


@pytest.mark.long
def test_a_reference_model_runs_beside_a_step(ranks: RankPools) -> None:
    """Microbatches have other lengths, which only the sender of a message knows."""
    import trainers

    args = trainers.arguments(2)
    alone = ranks(2).run(taught, args=args, share=None)
    beside = ranks(2).run(taught, args=args, share=0.5)
    assert [losses for losses, _ in beside] == [losses for losses, _ in alone]
    for _, shapes in beside:
        assert len(shapes) == 4
        assert len(set(shapes)) > 1


@pytest.mark.parametrize("share", [0.0, -1.0, float("inf")])
def test_a_teacher_without_a_share_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match=r"teacher is .*: give the share of a forward"):
        Settings(pipeline_schedule="v-half", num_microbatches=4, teacher=share)


def test_two_second_models_are_refused() -> None:
    import trainers

    settings = Settings(
        pipeline_schedule="v-half", num_microbatches=4, teacher=0.5, pipeline_encoder=0.2
    )
    with pytest.raises(UsageError, match="pipeline_encoder and teacher are two second models"):
        install(settings, trainers.arguments(2))
