"""What the first stage reads ahead of its F, and sums of tied gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.vocabulary import FirstStage, HandoffBuffer, TiedGradient
from megatron_zb.megatron_core.vocabulary_shard import Lookups
from megatron_zb.runtime.vocabulary import Rows


class Model(torch.nn.Module):
    """A first stage in front of nothing: it returns what the embedding gives."""

    pre_process = True

    def __init__(self, lookups: Lookups) -> None:
        super().__init__()
        self.lookups = lookups

    def forward(
        self, input_ids: Any = None, labels: Any = None, decoder_input: Any = None
    ) -> torch.Tensor:
        return self.lookups(input_ids)


def first_stage(step: Callable[..., Any], data: Iterator[Any], depths: int = 1) -> FirstStage:
    model = Model(Lookups(spread=True))
    called: Any = SimpleNamespace(
        physical=SimpleNamespace(holds_output=lambda *_: False),
        pp_rank=0,
        pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: 1)),
        forward_only=False,
        memory=None,
        placeholder=lambda microbatch: torch.zeros(3, 2, 1),
        forward_step_func=step,
        data_iterators=[data],
        model=[model],
    )
    split: Any = SimpleNamespace(queue=SimpleNamespace())
    shard = SimpleNamespace(rows=lambda sequence_parallel: Rows(0, 8))
    embedding = SimpleNamespace(start=0, spread=True, shard=shard)
    output: Any = SimpleNamespace(end=1, depths=depths, embedding=embedding)
    return FirstStage(called, 0, split, output, HandoffBuffer())


class Watched:
    """A user's context manager that keeps the exceptions which leave it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, *_: object) -> None:
        self.seen.append(kind)


def test_a_microbatch_is_read_without_the_model() -> None:
    """Each once, its tokens in the order of the sequence; no exception ends the forward step."""
    watched, shapes = Watched(), []

    def step(data: Iterator[torch.Tensor], model: Model) -> Any:
        with watched:
            result = model(next(data), labels=1)
        shapes.append(result.shape)
        return result, None

    stage = first_stage(step, iter([torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3)]))
    assert stage.read(0).tolist() == [1, 4, 2, 5, 3, 6]
    assert stage.read(1).tolist() == [1.0] * 6
    assert watched.seen == [None, None]
    assert shapes == [(3, 2, 1)] * 2


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda output: output * 2, "mul"),
        (lambda output: output.view(-1).float().sum() and output, "view"),
        (lambda output: torch.cat([output, output]), "cat"),
        (lambda output: [*output][3], "unbind"),
        (lambda output: torch.zeros(1), "another output"),
    ],
    ids=["changed", "looked at", "in a list", "an error", "another"],
)
def test_a_step_that_uses_the_output_is_refused_after_it(change: Any, name: str) -> None:
    watched = Watched()

    def step(data: Iterator[torch.Tensor], model: Model) -> Any:
        with watched:
            output = model(next(data))
        return change(output), None

    stage = first_stage(step, iter([torch.ones(2, 3)]))
    with pytest.raises(UsageError) as caught:
        stage.read(0)
    assert str(caught.value) == (
        f"the forward step uses the output of the model of the first stage ({name}) before it "
        "returns it, so the embedding cannot be vocabulary parallel: compute in the loss function, "
        "or give --pipeline-vocabulary off"
    )
    assert watched.seen == [None]


def test_for_prediction_the_tokens_that_follow_are_read_too() -> None:
    """None follows the last one, for which Megatron takes number 0."""
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    stage = first_stage(lambda data, model: (model(next(data)), None), iter([tokens]), depths=3)
    assert stage.read(0).view(3, 3, 2).mT.tolist() == [
        [[1, 2, 3], [4, 5, 6]],
        [[2, 3, 0], [5, 6, 0]],
        [[3, 0, 0], [6, 0, 0]],
    ]


def test_a_step_that_reads_no_tokens_is_refused() -> None:
    stage = first_stage(lambda data, model: (torch.zeros(1), None), iter([]))
    with pytest.raises(UsageError, match="did not call the model of the first stage"):
        stage.read(0)
    for options in ({}, {"input_ids": torch.ones(1, 2), "decoder_input": torch.ones(1)}):
        stage = first_stage(lambda data, model, o=options: (model(**o), None), iter([]))
        with pytest.raises(UsageError, match="was not called with input_ids"):
            stage.read(0)


def test_an_error_of_the_users_own_step_is_raised_and_the_model_runs_again() -> None:
    def step(data: Iterator[Any], model: Model) -> Any:
        raise KeyError("tokens")

    stage = first_stage(step, iter([]))
    with pytest.raises(KeyError, match="tokens"):
        stage.read(0)
    model = stage._step.model[0]
    model.lookups.given = [torch.ones(6, 1)]
    assert model(torch.ones(2, 3)).shape == (3, 2, 1)


@pytest.mark.parametrize("spread", [True, False])
def test_rows_have_the_shape_of_megatrons_embedding(spread: bool) -> None:
    """Of 3 tokens in 2 samples, in which a row of one number says which token it is."""
    lookups = Lookups(spread)
    lookups.given = [torch.tensor([[1.0], [4.0], [2.0], [5.0], [3.0], [6.0]])]
    rows = lookups(torch.ones(2, 3)).squeeze(2)
    of_samples = rows.t() if spread else rows
    assert of_samples.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_a_tied_gradient_is_added_after_all_passes() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    main_grad = weight.main_grad = torch.tensor([1.0, 1.0])  # type: ignore[attr-defined]
    tied = TiedGradient(weight, 3)
    for gradient in (None, torch.tensor([2.0, 0.0])):
        if gradient is not None:
            tied.add(gradient)
        tied.passed()
    assert main_grad.tolist() == [1.0, 1.0]
    tied.passed()
    assert main_grad.tolist() == [3.0, 1.0]
