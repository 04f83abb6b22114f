"""Rules for late updates, against their formulas written out in plain numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Muon, Optimizer

from megatron_zb.errors import UsageError
from megatron_zb.runtime.update_rules import (
    ErrorFeedback,
    LinearPrediction,
    PlainUpdate,
    UpdateRule,
    WeightPrediction,
)

WEIGHTS = (0.8, -1.3, 1.7)
GRADIENTS = ((0.3, -0.7, 0.2), (-0.1, 0.5, 0.9), (0.6, 0.4, -0.5), (-0.2, 0.8, 0.1))
RATES = (0.07, 0.02, 0.11, 0.035)
"""By step: a rate that changes."""
DECAY, EPSILON, BETAS, MOMENTUM, DAMPENING = 0.13, 0.03, (0.6, 0.8), 0.7, 0.4


# --- the formulas: what a step subtracts from one weight, and what its momentum predicts


@dataclass
class Formula:
    """An optimizer of one weight, in plain numbers."""

    steps: int = 0
    first: float = 0.0
    second: float = 0.0

    def update(self, weight: float, gradient: float, rate: float) -> float:
        raise NotImplementedError

    def predicted(self, weight: float, rate: float, ahead: float) -> float:
        raise NotImplementedError


class OfSGD(Formula):
    def update(self, weight: float, gradient: float, rate: float) -> float:
        gradient += DECAY * weight
        new = gradient if self.steps == 0 else (1 - DAMPENING) * gradient
        self.first = MOMENTUM * self.first + new
        self.steps += 1
        return rate * self.first

    def predicted(self, weight: float, rate: float, ahead: float) -> float:
        return weight - rate * ahead * self.first


class OfAdam(Formula):
    coupled, decoupled = DECAY, 0.0

    def update(self, weight: float, gradient: float, rate: float) -> float:
        gradient += self.coupled * weight
        self.steps += 1
        self.first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        self.second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        return rate * (self._direction + self.decoupled * weight)

    @property
    def _direction(self) -> float:
        first = self.first / (1 - BETAS[0] ** self.steps)
        second = self.second / (1 - BETAS[1] ** self.steps)
        return first / (math.sqrt(second) + EPSILON)

    def predicted(self, weight: float, rate: float, ahead: float) -> float:
        return weight - rate * ahead * (self._direction + self.decoupled * weight)


class OfAdamW(OfAdam):
    coupled, decoupled = 0.0, DECAY


def sgd(weights: Sequence[Tensor]) -> Optimizer:
    return SGD(weights, lr=1, momentum=MOMENTUM, dampening=DAMPENING, weight_decay=DECAY)


def adam(weights: Sequence[Tensor]) -> Optimizer:
    return Adam(weights, lr=1, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


def adamw(weights: Sequence[Tensor]) -> Optimizer:
    return AdamW(weights, lr=1, betas=BETAS, eps=EPSILON, weight_decay=DECAY)


class FusedAdam(Optimizer):
    """Stand-in for those of apex and Transformer Engine, which need a GPU.

    Torch's optimizer makes each step. Its numbers are where the fused ones keep theirs.
    """

    def __init__(self, weights: Sequence[Tensor], kind: type[Adam]) -> None:
        self._options: dict[str, Any] = {"betas": BETAS, "eps": EPSILON, "weight_decay": DECAY}
        super().__init__(weights, {"lr": 1.0, "bias_correction": True, **self._options})
        self.adam_w_mode, self._kind = int(kind is AdamW), kind

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        done = group.setdefault("step", 0)
        for weight in group["params"]:
            made = self._kind([weight], lr=group["lr"], **self._options)
            if self.state[weight]:
                made.state[weight] = {**self.state[weight], "step": torch.tensor(float(done))}
            made.step()
            numbers = {name: it for name, it in made.state[weight].items() if name != "step"}
            self.state[weight] = numbers
        group["step"] = done + 1


def fused_adam(weights: Sequence[Tensor]) -> Optimizer:
    return FusedAdam(weights, Adam)


def fused_adamw(weights: Sequence[Tensor]) -> Optimizer:
    return FusedAdam(weights, AdamW)


Make = Callable[[Sequence[Tensor]], Optimizer]
KINDS = {
    "sgd": (sgd, OfSGD),
    "adam": (adam, OfAdam),
    "adamw": (adamw, OfAdamW),
    "fused-adam": (fused_adam, OfAdam),
    "fused-adamw": (fused_adamw, OfAdamW),
}
of_all = pytest.mark.parametrize(("make", "formula"), KINDS.values(), ids=KINDS)
OWN_STEPS = {name: kind for name, kind in KINDS.items() if not name.startswith("fused")}
"""Optimizers that count the steps of each weight; a fused one counts those of a group."""


# --- a training of one parameter for each weight


@dataclass
class Trained:
    """Parameters that an optimizer steps under a rule."""

    make: Make
    rule: UpdateRule
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = self.weights or [
            torch.tensor([it], dtype=torch.float64, requires_grad=True) for it in WEIGHTS
        ]
        self.optimizer = self.make(self.weights)

    def step(self, gradients: Sequence[float | None], rate: float) -> None:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = None if gradient is None else torch.full_like(weight, gradient)
        self.set_rate(rate)
        self.rule.step(self.weights, self.optimizer.step)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def steps(self) -> Iterator[int]:
        for number, (gradients, rate) in enumerate(zip(GRADIENTS, RATES, strict=True)):
            self.step(gradients, rate)
            yield number

    @property
    def numbers(self) -> list[float]:
        return [it.item() for it in self.weights]

    def ahead(self) -> list[float] | None:
        found = self.rule.ahead(self.weights, self.optimizer)
        return None if found is None else [it.item() for it in found]


def close(values: Sequence[float]) -> Any:
    return pytest.approx(values, rel=1e-12, abs=1e-14)


# --- a step with each rule


@of_all
def test_a_plain_update_is_the_optimizers(make: Make, formula: type[Formula]) -> None:
    trained = Trained(make, PlainUpdate())
    expected, formulas = list(WEIGHTS), [formula() for _ in WEIGHTS]
    for step in trained.steps():
        for at, one in enumerate(formulas):
            expected[at] -= one.update(expected[at], GRADIENTS[step][at], RATES[step])
        assert trained.numbers == close(expected)
        assert trained.ahead() is None


@of_all
@pytest.mark.parametrize("strength", [1.0, 0.4, 0.0])
def test_error_feedback_adds_the_change_of_the_update(
    make: Make, formula: type[Formula], strength: float
) -> None:
    trained = Trained(make, ErrorFeedback(strength))
    expected, formulas, before = list(WEIGHTS), [formula() for _ in WEIGHTS], [0.0, 0.0, 0.0]
    for step in trained.steps():
        for at, one in enumerate(formulas):
            update = one.update(expected[at], GRADIENTS[step][at], RATES[step])
            change = update - before[at] if step else 0.0  # the first step is ordinary
            expected[at] -= update + strength * change
            before[at] = update  # with the rate that it had
        assert trained.numbers == close(expected)


@pytest.mark.parametrize(("make", "formula"), OWN_STEPS.values(), ids=OWN_STEPS)
def test_error_feedback_takes_a_missing_gradient_for_an_update_of_zero(
    make: Make, formula: type[Formula]
) -> None:
    trained = Trained(make, ErrorFeedback())
    gradients: list[list[float | None]] = [
        [0.3, None, -0.2],
        [None, 0.5, 0.4],
        [0.6, None, None],
        [-0.2, 0.7, 0.1],
    ]
    expected, formulas, before = list(WEIGHTS), [formula() for _ in WEIGHTS], [0.0, 0.0, 0.0]
    for step, (given, rate) in enumerate(zip(gradients, RATES, strict=True)):
        trained.step(given, rate)
        for at, (one, gradient) in enumerate(zip(formulas, given, strict=True)):
            if gradient is None:
                before[at] = 0.0
                continue
            update = one.update(expected[at], gradient, rate)
            expected[at] -= update + (update - before[at] if step else 0.0)
            before[at] = update
        assert trained.numbers == close(expected)


def test_error_feedback_leaves_a_change_without_a_gradient_as_it_is() -> None:
    weight = torch.tensor([1.0], dtype=torch.float64)
    rule = ErrorFeedback()
    for _ in range(3):
        rule.step([weight], lambda: weight.sub_(0.25))
    assert weight.item() == 0.25
    assert rule.state_dict()["updates"][0].item() == 0.0


@of_all
@pytest.mark.parametrize("ahead", [1, 3])
def test_weights_are_predicted_along_the_momentum(
    make: Make, formula: type[Formula], ahead: int
) -> None:
    trained = Trained(make, WeightPrediction(ahead))
    assert trained.ahead() == list(WEIGHTS)
    expected, formulas = list(WEIGHTS), [formula() for _ in WEIGHTS]
    for step in trained.steps():
        next_rate = 0.5 * RATES[step]
        trained.set_rate(next_rate)
        for at, one in enumerate(formulas):
            expected[at] -= one.update(expected[at], GRADIENTS[step][at], RATES[step])
        assert trained.numbers == close(expected)
        predicted = [
            one.predicted(weight, next_rate, ahead)
            for one, weight in zip(formulas, expected, strict=True)
        ]
        assert trained.ahead() == close(predicted)


@of_all
def test_a_weight_that_has_not_been_stepped_is_predicted_to_stay(
    make: Make, formula: type[Formula]
) -> None:
    trained = Trained(make, WeightPrediction())
    trained.step([0.3, None, -0.2], RATES[0])
    found = trained.ahead()
    assert found is not None
    assert [new == old for new, old in zip(found, trained.numbers, strict=True)] == [
        *(False, True, False)
    ]


def test_adam_with_decoupled_decay_is_predicted_as_adamw() -> None:
    def decoupled(weights: Sequence[Tensor]) -> Optimizer:
        options: dict[str, Any] = {"decoupled_weight_decay": True}
        return Adam(weights, lr=1, betas=BETAS, eps=EPSILON, weight_decay=DECAY, **options)

    found = []
    for make in (decoupled, adamw):
        trained = Trained(make, WeightPrediction())
        list(trained.steps())
        found.append(trained.ahead())
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [adam, adamw])
def test_the_decay_is_known_where_torch_has_no_option_for_it(make: Make) -> None:
    trained = Trained(make, WeightPrediction())
    list(trained.steps())
    before = trained.ahead()
    for group in trained.optimizer.param_groups:
        del group["decoupled_weight_decay"]  # which torch 2.6 does not have
    assert trained.ahead() == before


@pytest.mark.parametrize("kind", [WeightPrediction, LinearPrediction])
def test_predicted_weights_do_not_change_with_the_next_step(kind: type[UpdateRule]) -> None:
    trained = Trained(sgd, kind())
    trained.step([0.3, None, -0.2], RATES[0])
    found = trained.rule.ahead(trained.weights, trained.optimizer)
    assert found is not None
    before = [it.clone() for it in found]
    trained.step(GRADIENTS[1], RATES[1])
    assert found == before
    assert not any(it.requires_grad for it in found)


@of_all
def test_a_linear_prediction_goes_on_as_the_newest_update(
    make: Make, formula: type[Formula]
) -> None:
    trained = Trained(make, LinearPrediction(2))
    assert trained.ahead() is None
    before = trained.numbers
    for _ in trained.steps():
        now = trained.numbers
        assert trained.ahead() == close(
            [new + 2 * (new - old) for new, old in zip(now, before, strict=True)]
        )
        before = now


def test_feedback_goes_where_the_linear_prediction_computes() -> None:
    """Without decay both are one path: they differ in which weights count as the newest."""

    def without_decay(weights: Sequence[Tensor]) -> Optimizer:
        return Adam(weights, lr=1, betas=BETAS, eps=EPSILON)

    fed = Trained(without_decay, ErrorFeedback())
    predicting = Trained(without_decay, LinearPrediction())
    apart: list[list[float]] = []
    after: list[list[float]] = []
    for _ in zip(fed.steps(), predicting.steps(), strict=True):
        after.append(predicting.numbers)
        ahead = predicting.ahead()
        assert ahead is not None
        apart.append([a - b for a, b in zip(fed.numbers, ahead, strict=True)])
    first_update = [old - new for old, new in zip(WEIGHTS, after[0], strict=True)]
    assert apart == [close(first_update)] * len(RATES)  # the first step of the feedback is ordinary


# --- Muon


def by_muon(gradients: Sequence[Tensor], weight: Tensor) -> Iterator[Tensor]:
    """What Muon subtracts in each step, of weights that the caller changes in between."""
    momentum = torch.zeros_like(weight)
    for gradient, rate in zip(gradients, RATES, strict=True):
        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.95 * momentum + 0.05 * gradient
        x = (x / x.norm()).bfloat16()
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        yield rate * (0.1 * weight + x.float())


def test_error_feedback_of_muon() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(3, 5, generator=generator, requires_grad=True)
    gradients = [torch.randn(3, 5, generator=generator) for _ in RATES]
    optimizer, rule = Muon([weight], weight_decay=0.1), ErrorFeedback()
    expected = weight.detach().clone()
    before: Tensor | None = None
    updates = by_muon(gradients, expected)
    for gradient, rate in zip(gradients, RATES, strict=True):
        update = next(updates)
        expected -= update + (0 if before is None else update - before)
        before = update
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient
        rule.step([weight], optimizer.step)
        assert (weight - expected).abs().max() < 0.05 * sum(RATES)  # bf16 has 8 bits


# --- states


@of_all
@pytest.mark.parametrize("kind", [PlainUpdate, ErrorFeedback, LinearPrediction, WeightPrediction])
def test_a_restored_rule_goes_on_bit_for_bit(
    make: Make, formula: type[Formula], kind: type[UpdateRule]
) -> None:
    whole = Trained(make, kind())
    found = [(whole.numbers, whole.ahead()) for _ in whole.steps()]
    for saved_after in range(1, len(RATES)):
        first = Trained(make, kind())
        for step in range(saved_after):
            first.step(GRADIENTS[step], RATES[step])
        kept = copy.deepcopy((first.weights, first.optimizer.state_dict(), first.rule.state_dict()))
        resumed = Trained(make, kind(), kept[0])
        resumed.optimizer.load_state_dict(kept[1])
        resumed.rule.load_state_dict(kept[2])
        for step in range(saved_after, len(RATES)):
            resumed.step(GRADIENTS[step], RATES[step])
            assert (resumed.numbers, resumed.ahead()) == found[step]


def test_what_a_rule_has_loaded_does_not_change_with_the_one_that_saved() -> None:
    first, second = Trained(adam, ErrorFeedback()), ErrorFeedback()
    first.step(GRADIENTS[0], RATES[0])
    second.load_state_dict(first.rule.state_dict())
    loaded = [it.clone() for it in second.state_dict()["updates"]]
    first.step(GRADIENTS[1], RATES[1])
    assert loaded == second.state_dict()["updates"]


# --- refusals


def test_an_optimizer_without_a_formula_is_refused() -> None:
    weight = torch.zeros(2, 2, requires_grad=True)
    with pytest.raises(UsageError) as refused:
        WeightPrediction().ahead([weight], Muon([weight]))
    assert str(refused.value) == (
        "weights cannot be predicted from the state of Muon: give SGD with momentum, Adam or "
        "AdamW, or predict linearly from the weights"
    )


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (SGD, {"momentum": 0.9, "nesterov": True}, "SGD with nesterov"),
        (SGD, {"momentum": 0.9, "maximize": True}, "SGD with maximize"),
        (Adam, {"amsgrad": True}, "Adam with amsgrad"),
        (AdamW, {"maximize": True}, "AdamW with maximize"),
    ],
)
def test_an_option_that_a_formula_lacks_is_refused(
    kind: type[Optimizer], options: dict[str, Any], name: str
) -> None:
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(UsageError) as refused:
        WeightPrediction().ahead([weight], kind([weight], **{"lr": 0.1, **options}))
    assert str(refused.value) == (
        f"weights cannot be predicted from the state of {name}: leave it out, or predict linearly "
        "from the weights"
    )


def test_sgd_without_momentum_is_refused() -> None:
    weight = torch.zeros(2, requires_grad=True)
    with pytest.raises(UsageError) as refused:
        WeightPrediction().ahead([weight], SGD([weight], lr=0.1))
    assert str(refused.value) == (
        "weights cannot be predicted from the state of SGD without momentum, which is empty: give "
        "it a momentum, or predict linearly from the weights"
    )


@pytest.mark.parametrize("strength", [-0.5, math.nan])
def test_a_negative_strength_is_refused(strength: float) -> None:
    with pytest.raises(UsageError, match=r"an error feedback of strength \S+ must be 0 or more"):
        ErrorFeedback(strength)
