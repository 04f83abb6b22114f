"""A model whose encoder runs on every rank trains as with the encoder in its first stage."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from brief_searches import briefly
from checkpoint_jobs import Job
from gpt_cases import (
    GPTCase,
    Outcome,
    _zero_gradients,
    as_hybrid,
    built,
    forward_backward,
    microbatches,
    run,
    skip_without_hybrids,
)
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from model_options import LAYERS_OF_EXPERTS, WHOLE_LAYERS
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.encoders import ENCODERS
from megatron_zb.megatron_core.model_calls import inner_model
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.megatron_core.spread_encoder import EncodedStage
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole
from megatron_zb.schedules.step_plan import Lengths

M = 5
FIRST = GPTCase(images=(1, 0, 2, 0, 0, 0, 1, 1), layers=8)
"""Images of changing number, and microbatches without any."""
ON_EVERY_RANK = SecondModel(SecondRole.ENCODER, forward=0.1, backward=0.2, copies=True)
SPREAD = replace(FIRST, second_model=ON_EVERY_RANK)
ENCODER = ("vision_model.", "vision_projection.")


def outcome(case: GPTCase, name: str, forward_only: bool = False) -> Outcome:
    with briefly():
        found = run(case, name, [M], forward_only)[M]
    shard = parallel_state.get_tensor_model_parallel_rank()
    return Outcome(found.losses, {f"{k}, shard {shard}": v for k, v in found.gradients.items()})


def check_equal(first: list[Outcome], spread: list[Outcome], most: float = 1e-6) -> None:
    """Losses and gradients are equal to the last bit, but those of the encoder to ``most``.

    These are sums of microbatches in another order: by ranks, and then over the ranks.
    """
    expected = {name: it for of_rank in first for name, it in of_rank.gradients.items()}
    assert [it.losses for it in spread] == [it.losses for it in first]
    for of_rank in spread:
        for name, gradient in of_rank.gradients.items():
            if name.startswith(ENCODER):
                norm = expected[name].norm()
                assert (gradient - expected[name]).norm() <= most * norm, name
            else:
                assert torch.equal(gradient, expected[name]), name
    of_encoder = {name for name in expected if name.startswith(ENCODER)}
    held = [name for it in spread for name in it.gradients if name.startswith(ENCODER)]
    assert {held.count(name) for name in of_encoder} == {held.count(held[0])} if of_encoder else {0}
    assert {name for it in spread for name in it.gradients} == expected.keys()


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-zb", "interleaved"])
def test_gradients_are_those_of_an_encoder_in_the_first_stage(
    ranks: RankPools, name: str, p: int
) -> None:
    first = ranks(p).run(outcome, case=FIRST, name=name)
    check_equal(first, ranks(p).run(outcome, case=SPREAD, name=name))


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "frozen encoder": ({"frozen": "vision_model"}, 1e-6),
    "frozen language model": ({"frozen": "language_model"}, 1e-6),
    "replicas": ({"data_parallel": 2}, 1e-6),
    "tensors": ({"tensor_parallel": 2}, 1e-6),
    "bf16": ({"dtype": "bfloat16"}, 1e-6),
    "unwrapped": ({"wrapped": False}, 1e-6),
    "tokens": ({"per_token_loss": True}, 1e-6),
    "no images": ({"images": (0,)}, 0.0),
    "experts": ({"options": LAYERS_OF_EXPERTS}, 1e-6),
    "recomputed layers": ({"options": WHOLE_LAYERS}, 1e-6),
    "untied": ({"tied": False}, 1e-6),
    "rotary": ({"rotary": True}, 1e-6),
    "loss scale": ({"dtype": "float16", "grad_scale": 1024.0}, 1e-3),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_features_run_with_an_encoder_on_every_rank(ranks: RankPools, name: str) -> None:
    options, most = CASES[name]
    first, spread = replace(FIRST, **options), replace(SPREAD, **options)
    pool = ranks(2 * first.data_parallel * first.tensor_parallel)
    expected = pool.run(outcome, case=first, name="v-half")
    check_equal(expected, pool.run(outcome, case=spread, name="v-half"), most)


@pytest.mark.long
def test_hybrid_models_run_with_an_encoder_on_every_rank(ranks: RankPools) -> None:
    first, spread = (as_hybrid(replace(it, layers=4)) for it in (FIRST, SPREAD))
    skip_without_hybrids(first)
    expected = ranks(2).run(outcome, case=first, name="v-zb")
    check_equal(expected, ranks(2).run(outcome, case=spread, name="v-zb"))


def test_an_evaluation_runs_the_encoder(ranks: RankPools) -> None:
    first = ranks(2).run(outcome, case=FIRST, name="v-half", forward_only=True)
    spread = ranks(2).run(outcome, case=SPREAD, name="v-half", forward_only=True)
    assert [it.losses for it in spread] == [it.losses for it in first]
    assert any(it.losses for it in spread)


def clipped_steps(
    case: GPTCase, name: str, *, verifies: bool = False
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Losses and norms of clipped steps that read from one iterator, and the weights."""
    config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.1)
    with briefly(), built(case, name, M, lambda: 0) as (adapter, chunks):
        assert adapter is not None
        if verifies:
            adapter.verify()
        adapter.warm_up(always=True)
        adam = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
        data = [microbatches(case, 3 * M + 8) for _ in chunks]
        found: list[Any] = []
        for step in range(3):
            _zero_gradients(chunks)
            m = M - (step == 1)  # a step of another number of microbatches
            records = forward_backward(adapter.forward_backward_func, chunks, data, m)
            _, norm, _ = adam.step()
            found.append(([float(it["lm loss"]) for it in records], norm))
            _zero_gradients(chunks)
            held = [microbatches(case, 4, 100) for _ in chunks]
            for chunk in chunks:
                chunk.eval()
            later = forward_backward(
                adapter.forward_backward_func, chunks, held, 4, forward_only=True
            )
            for chunk in chunks:
                chunk.train()
            found[-1] += ([float(it["lm loss"]) for it in later],)
        named = (pair for it in chunks for pair in global_parameters(it).items())
        weights = {name.replace("module.", ""): weight.detach() for name, weight in named}
        return found if found[0][0] else [], weights


@pytest.mark.long
@pytest.mark.parametrize("more", [{}, {"dropout": 0.1}], ids=["plain", "dropout"])
@pytest.mark.parametrize("verifies", [False, True], ids=["", "verified"])
def test_steps_are_those_of_an_encoder_in_the_first_stage(
    ranks: RankPools, more: dict[str, Any], verifies: bool
) -> None:
    """Each weight counts once in a norm, the next step reads on, and the copies stay equal."""
    spread = ranks(2).run(
        clipped_steps, case=replace(SPREAD, **more), name="v-half", verifies=verifies
    )
    first = ranks(2).run(clipped_steps, case=replace(FIRST, **more), name="v-half")
    ours, theirs = (next(found for found, _ in it if found) for it in (spread, first))
    for (losses, norm, later), (their_losses, their_norm, their_later) in zip(
        ours, theirs, strict=True
    ):
        assert losses == pytest.approx(their_losses, rel=1e-5)
        assert later == pytest.approx(their_later, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-5)
        assert norm > 0.1
    assert ours[0][0] == theirs[0][0]
    expected = {name: weight for _, weights in first for name, weight in weights.items()}
    one, other = (weights for _, weights in spread)
    of_encoder = [name for name in one if name.startswith(ENCODER)]
    assert of_encoder
    for name in of_encoder:
        assert torch.equal(one[name], other[name]), name
    for name, weight in expected.items():
        ours_of = one.get(name, other.get(name))
        torch.testing.assert_close(ours_of, weight, rtol=1e-4, atol=1e-5, msg=name)


def losses_after_checkpoints(cases: list[GPTCase], folder: Path) -> list[list[float]]:
    """Losses of two steps after a checkpoint of the first case, loaded by each."""
    found = []
    for number, case in enumerate([cases[0], *cases]):
        with briefly(), built(case, "v-half", 4) as (adapter, chunks):
            found.append(Job(case, adapter, chunks).losses(folder, begins=not number))
    return found


@pytest.mark.long
@pytest.mark.parametrize("begins", [SPREAD, FIRST], ids=["spread", "first"])
@pytest.mark.parametrize(
    "more", [{}, {"data_parallel": 2, "distributed_optimizer": True}], ids=["plain", "distributed"]
)
def test_checkpoints_are_those_of_an_encoder_in_the_first_stage(
    ranks: RankPools, tmp_path: Path, begins: GPTCase, more: dict[str, Any]
) -> None:
    cases = [replace(it, **more) for it in (begins, SPREAD, FIRST)]
    pool = ranks(2 * cases[0].data_parallel)
    for found in pool.run(losses_after_checkpoints, cases=cases, folder=tmp_path):
        on, resumed, spread, first = found
        assert resumed == on
        assert spread == pytest.approx(on, rel=1e-5)
        assert first == pytest.approx(on, rel=1e-5)


def contents_of_checkpoints(folder: Path) -> list[set[str]]:
    """Names in a checkpoint of either placement."""
    found = []
    for number, case in enumerate((FIRST, SPREAD)):
        with briefly(), built(case, "v-half", 4) as (adapter, chunks):
            job = Job(case, adapter, chunks)
            job.train(1)
            job.save(folder / str(number))
            torch.distributed.barrier()
            found.append(set(job.contents(folder / str(number))))
    return found


def test_checkpoints_have_the_same_names(ranks: RankPools, tmp_path: Path) -> None:
    for first, spread in ranks(2).run(contents_of_checkpoints, folder=tmp_path):
        assert spread == first
        assert any("vision_model" in name for name in first)


def pipeline_encoder(chunks: list[Any]) -> Any:
    """The encoder of a rank."""
    return inner_model(chunks[0]).vision_model


def test_layers_that_keep_converted_weights_convert_them_in_each_step() -> None:
    """As those of Transformer-Engine do in 8 bits."""
    model, layer = torch.nn.Module(), torch.nn.Linear(1, 1)
    model.vision_model = torch.nn.Sequential(layer)
    vars(layer)["is_first_microbatch"] = False
    ENCODERS["LLaVAModel"].begin_step(model)
    assert vars(layer)["is_first_microbatch"] is True


def said_of(case: GPTCase, change: str) -> str:
    """What is said of a step or a model that cannot have its encoder on every rank."""
    with (
        pytest.raises(UsageError) as error,
        briefly(),
        built(case, "v-half", M) as (pipeline, chunks),
    ):
        assert pipeline is not None
        if change == "lengths":
            lengths = Lengths.of([*range(1, M + 1)])
            pipeline.planned.plan(lengths, keeps_order=True, forward_only=False)
        if change == "weights" and torch.distributed.get_rank() == 1:
            next(pipeline_encoder(chunks).parameters()).data += 1.0
        if change == "frozen":
            rules: Any = pipeline.schedule.rules
            frozen = replace(rules, second=replace(ON_EVERY_RANK, backward=0.0))
            pipeline.current.use(replace(pipeline.schedule, rules=frozen))
        data = [microbatches(case, M) for _ in chunks]
        forward_backward(pipeline.forward_backward_func, chunks, data, M)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("overlap", "v-half: overlap_grad_reduce reduces gradients before those of all copies"),
        ("lengths", "a step with an encoder is not planned for unequal microbatches: do not"),
        ("weights", "v-half: the copies of the encoder begin with other weights on some pipeline"),
        ("frozen", "v-half: the encoder has weights that train, but the schedule has no backward"),
        ("text", "the encoder of a GPTModel cannot run on every rank, only that of LLaVAModel"),
    ],
    ids=["overlap", "lengths", "weights", "frozen", "text"],
)
def test_what_an_encoder_on_every_rank_cannot_have_is_refused(
    ranks: RankPools, change: str, said: str
) -> None:
    case = replace(SPREAD, overlap_grad_reduce=change == "overlap")
    if change == "text":
        case = replace(case, images=())
    for found in ranks(2).run(said_of, case=case, change=change):
        assert found.startswith(said)


def test_an_output_that_the_model_has_not_used_has_a_gradient_of_zeros(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Models of Megatron-Bridge do not call their encoder for a microbatch without images."""
    output = torch.ones(0, 4)
    stage: Any = object.__new__(EncodedStage)
    stage._live = {3: (output, None)}
    monkeypatch.setattr(MegatronStage, "backward", lambda stage, microbatch, gradient: None)
    found = stage.backward(3, None)
    assert found is not output
    assert found.shape == output.shape
