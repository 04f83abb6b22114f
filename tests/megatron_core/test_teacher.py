"""A frozen teacher runs beside training as its whole forward before the step does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from brief_searches import briefly
from gpt_cases import (
    SEQUENCE,
    VOCABULARY,
    GPTCase,
    Outcome,
    _zero_gradients,
    built,
    forward_backward,
    gradients,
    microbatches,
)
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from model_options import LAYERS_OF_EXPERTS, WHOLE_LAYERS
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.frozen_model import FrozenModel
from megatron_zb.megatron_core.random_streams import initialise_by_global_name
from megatron_zb.schedules.features.second_model import SecondModel, SecondRole

M = 5
CASE = GPTCase(layers=8)
TEACHER = SecondModel(SecondRole.TEACHER, forward=0.5)
WIDTH = 48


def teacher_chunk() -> Any:
    """The layers of a wider model on this rank, frozen."""
    group = parallel_state.get_pipeline_model_parallel_group()
    config = TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=group.size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    chunk = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        SEQUENCE,
        pre_process=group.rank() == 0,
        post_process=group.rank() == group.size() - 1,
    )
    initialise_by_global_name([chunk], config, seed=3)
    return chunk.requires_grad_(False).eval()


def hidden_or_logits(iterator: Iterator[Any], chunk: Any) -> torch.Tensor:
    """Run the teacher's layers of a rank on a batch."""
    batch = next(iterator)
    length = batch["tokens"].size(1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output: torch.Tensor = chunk(batch["tokens"], batch["positions"], causal)
    return output


def divergence(
    mask: torch.Tensor, outputs: Callable[[], torch.Tensor | None], logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The divergence of the student from the teacher, summed over the tokens of the loss mask."""
    teacher = outputs()
    assert teacher is not None
    assert not teacher.requires_grad
    each = torch.nn.functional.kl_div(
        logits.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    total, tokens = (each * mask).sum(), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": total.detach() / tokens}


def student_step(outputs: Any, iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """A forward step whose loss needs the next output of a teacher."""
    batch = next(iterator)
    length = batch["tokens"].size(1)
    causal = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    logits = model(batch["tokens"], batch["positions"], causal)
    return logits, partial(divergence, batch["loss_mask"], outputs)


def before_the_step(case: GPTCase, m: int, first: int) -> list[torch.Tensor]:
    """Megatron's order: the whole forward of the teacher for all microbatches of a step."""
    kept: list[torch.Tensor] = []

    def step(iterator: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
        def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            kept.append(output)
            return torch.zeros(()), {"lm loss": torch.zeros(())}

        return hidden_or_logits(iterator, chunk), keep

    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=microbatches(case, m, first),
            model=teacher_chunk(),
            num_microbatches=m,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=True,
        )
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    return kept


def outcomes(
    case: GPTCase, name: str, *, beside: bool, forward_only: bool = False
) -> list[Outcome]:
    """Losses and gradients of two steps, the second one of fewer microbatches."""
    found = []
    second = TEACHER if beside else None
    with briefly(), built(replace(case, second_model=second), name, M) as (adapter, chunks):
        assert adapter is not None
        teacher = None
        if beside:
            teacher = adapter.teach_with(FrozenModel(teacher_chunk(), hidden_or_logits))
            adapter.warm_up(always=True)
        data = [microbatches(case, 2 * M) for _ in chunks]
        for m, first in ((M, 0), (M - 1, M)):
            kept = iter([] if beside else before_the_step(case, m, first))
            outputs = (lambda: teacher.output) if teacher else partial(next, kept, None)
            _zero_gradients(chunks)
            records = forward_backward(
                adapter.forward_backward_func,
                chunks,
                data,
                m,
                step=partial(student_step, outputs),
                forward_only=forward_only,
            )
            losses = [float(it["lm loss"]) for it in records]
            found.append(Outcome(losses, dict(gradients(chunks))))
        assert teacher is None or teacher.output is None
    return found


def check_equal(pool: Any, case: GPTCase, name: str, *, forward_only: bool = False) -> None:
    more = {"case": case, "name": name, "forward_only": forward_only}
    expected, ours = (pool.run(outcomes, beside=beside, **more) for beside in (False, True))
    for of_rank, of_ours in zip(expected, ours, strict=True):
        for one, other in zip(of_rank, of_ours, strict=True):
            assert other.losses == one.losses
            assert other.gradients.keys() == one.gradients.keys()
            for key, value in one.gradients.items():
                assert torch.equal(other.gradients[key], value), key
    losses = [it.losses for of_rank in ours for it in of_rank if it.losses]
    assert len(losses) == 2 * case.data_parallel * case.tensor_parallel
    assert all(loss > 0 for of_step in losses for loss in of_step)


@pytest.mark.long
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "v-half", "v-zb", "interleaved"])
def test_a_teacher_beside_training_gives_what_it_gives_before_the_step(
    ranks: RankPools, name: str, p: int
) -> None:
    check_equal(ranks(p), CASE, name)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"data_parallel": 2},
        {"tensor_parallel": 2},
        {"per_token_loss": True},
        {"wrapped": False},
        {"overlap_grad_reduce": True},
        {"dtype": "bfloat16"},
        {"tied": False},
        {"options": LAYERS_OF_EXPERTS},
        {"options": WHOLE_LAYERS},
    ],
    ids=[
        "replicas",
        "tensors",
        "tokens",
        "unwrapped",
        "overlap",
        "bf16",
        "untied",
        "experts",
        "recomputed layers",
    ],
)
def test_features_run_beside_a_teacher(ranks: RankPools, more: dict[str, Any]) -> None:
    case = replace(CASE, **more)
    check_equal(ranks(2 * case.data_parallel * case.tensor_parallel), case, "v-half")


def test_an_evaluation_has_the_teacher(ranks: RankPools) -> None:
    check_equal(ranks(2), CASE, "v-zb", forward_only=True)


def said_of(case: GPTCase, change: str) -> str:
    """What is said of a teacher that is missing or trains, or of a schedule without one."""
    second = None if change == "schedule" else TEACHER
    if change == "copies":
        second = replace(TEACHER, copies=True)
    with (
        pytest.raises(UsageError) as error,
        briefly(),
        built(replace(case, second_model=second), "v-half", M) as (adapter, chunks),
    ):
        assert adapter is not None
        if change != "none":
            teacher = adapter.teach_with(FrozenModel(teacher_chunk(), hidden_or_logits))
            teacher.chunk.requires_grad_(change == "trains")
        data = [microbatches(case, M) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, M)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("none", "v-half: the schedule has the passes of a teacher, and there is none: give"),
        ("trains", "v-half: the teacher has weights that train: freeze them"),
        ("schedule", "v-half: the schedule has no passes of a teacher: give JobSizes"),
        ("copies", "training runs no teacher as a copy on each rank: give an encoder with a"),
    ],
    ids=["none", "trains", "schedule", "copies"],
)
def test_what_cannot_be_a_teacher_is_refused(ranks: RankPools, change: str, said: str) -> None:
    for found in ranks(2).run(said_of, case=CASE, change=change):
        assert found.startswith(said)
