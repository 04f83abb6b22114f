"""benchmarks/delayed_convergence.py: which weights each mode computes with, and what it prints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import delayed_convergence as script
import pytest
import torch
from jobs import run_script
from torch import Tensor, nn

from megatron_zb.runtime.update_rules import (
    ErrorFeedback,
    LinearPrediction,
    PlainUpdate,
    WeightPrediction,
)

PATH = Path(script.__file__)
SIZES = {"sequences": 2, "sequence": 8, "layers": 1, "hidden": 16, "heads": 2, "stages": 2}
NAMES = [name for name, _ in script.Attention(16, 2, 0.1).named_parameters()]
TINY = [word for name, size in SIZES.items() for word in (f"--{name}", str(size))]
STEPS = 6


def run_of(mode: str, optimizer: str = "sgd", **more: Any) -> dict[str, Any]:
    run = {"optimizer": optimizer, "mode": mode, "seed": 1, "learning_rate": 0.2, **SIZES}
    return {**run, "steps": 20, **more}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(256, (2, 9), generator=generator) for _ in range(STEPS)]


def losses_of(mode: str, **more: Any) -> list[float]:
    training = script.Training(run_of(mode, **more))
    return [training.step(tokens, step) for step, tokens in enumerate(batches())]


# --- which weights a mode computes with


@pytest.mark.parametrize(
    ("mode", "late"), [("sync", [0, 0, 0]), ("delay", [1, 1, 1]), ("by-depth", [2, 1, 0])]
)
def test_the_gradient_is_that_of_the_weights_of_so_many_updates_before(
    mode: str, late: list[int]
) -> None:
    run = run_of(mode, stages=3)
    layers = script.layers_of(run)
    stages = [
        [it for layer in stage for it in layer.parameters()]
        for stage in script.stages_of(layers, 3)
    ]
    every = [it for stage in stages for it in stage]
    optimizer = torch.optim.SGD(every, momentum=script.MOMENTUM)
    history = [[[it.detach().clone() for it in stage] for stage in stages]]
    losses = []
    for step, tokens in enumerate(batches()):
        for stage, delay, parameters in zip(range(3), late, stages, strict=True):
            for parameter, value in zip(
                parameters, history[max(0, step - delay)][stage], strict=True
            ):
                parameter.data.copy_(value)
        optimizer.zero_grad()
        loss = script.loss_of(layers, tokens)
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(every, 1.0)
        for stage, parameters in enumerate(stages):
            for parameter, value in zip(parameters, history[-1][stage], strict=True):
                parameter.data.copy_(value)
        # of 20 steps two warm up; then the rate falls in a line to a tenth
        rate = 0.2 * ((step + 1) / 2 if step < 2 else 1 - 0.9 * (step - 2) / 18)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        history.append([[it.detach().clone() for it in stage] for stage in stages])
    assert losses_of(mode, stages=3) == losses


def test_a_delay_changes_the_losses_from_the_third_update_on() -> None:
    sync, delayed = losses_of("sync"), losses_of("delay")
    assert delayed[0] == sync[0]
    assert delayed[1] == delayed_by_hand() != sync[1]
    assert all(a != b for a, b in zip(sync[2:], delayed[2:], strict=True))


def delayed_by_hand() -> float:
    """The second loss: that of the first weights."""
    layers = script.layers_of(run_of("sync"))
    return script.loss_of(layers, batches()[1]).item()


@pytest.mark.parametrize("mode", ["backpropagation", "backpropagation-prediction"])
def test_with_one_stage_nothing_is_late(mode: str) -> None:
    assert losses_of(mode, stages=1) == losses_of("sync", stages=1)


@pytest.mark.parametrize(("mode", "uses_newest"), [("backpropagation", True), ("by-depth", False)])
def test_b_computes_with_the_newest_weights_in_backpropagation_alone(
    mode: str, uses_newest: bool
) -> None:
    training = script.Training(run_of(mode))
    attention = dict(zip(NAMES, training.newest[0][2:], strict=True))
    attention["out"].data.zero_()  # where B uses it, nothing reaches q, k and v
    training.step(batches()[0], 0)
    found = attention["qkv"].grad
    assert found is not None
    assert bool(found.any()) != uses_newest


RULES = [
    ("sgd", "delay", [1, 1, 1], False, PlainUpdate),
    ("muon", "feedback", [1, 1, 1], False, ErrorFeedback),
    ("adamw", "prediction", [1, 1, 1], False, WeightPrediction),
    ("muon", "prediction", [1, 1, 1], False, LinearPrediction),
    ("sgd", "by-depth", [2, 1, 0], False, PlainUpdate),
    ("sgd", "backpropagation", [4, 2, 0], True, PlainUpdate),
    ("sgd", "backpropagation-prediction", [4, 2, 0], True, WeightPrediction),
    ("sgd", "partime", [4, 2, 0], True, PlainUpdate),
]


@pytest.mark.parametrize(("optimizer", "mode", "late", "newest", "kind"), RULES)
def test_delays_and_rules_of_a_mode(
    optimizer: str, mode: str, late: list[int], newest: bool, kind: type
) -> None:
    delays = script.delays_of(run_of(mode, optimizer, stages=3))
    assert (delays.late, delays.newest_in_backward) == (late, newest)
    rules = [delays.rule(each) for each in late]
    assert {type(rule) for rule in rules} == {kind}
    ahead = [it for it in rules if isinstance(it, (LinearPrediction, WeightPrediction))]
    assert [rule.steps for rule in ahead] == (late if "prediction" in mode else [])


def test_layers_are_split_evenly() -> None:
    layers: list[nn.Module] = [nn.Identity() for _ in range(10)]
    for stages, sizes in ((5, [2] * 5), (4, [2, 3, 3, 2]), (10, [1] * 10)):
        split = script.stages_of(layers, stages)
        assert [len(stage) for stage in split] == sizes
        assert [layer for stage in split for layer in stage] == layers


# --- optimizers


def test_muon_steps_the_matrices_of_blocks_and_adamw_the_rest() -> None:
    training = script.Training(run_of("sync", "muon"))
    muon, adamw = training.optimizers
    assert (type(muon), type(adamw)) == (script.Muon, torch.optim.AdamW)
    shapes = [tuple(it.shape) for it in muon.param_groups[0]["params"]]
    assert sorted(shapes) == [(16, 16), (16, 64), (48, 16), (64, 16)]
    stepped = [it for one in training.optimizers for it in one.param_groups[0]["params"]]
    assert {id(it) for it in stepped} == {id(it) for it in training.every}
    assert len(stepped) == len(training.every)
    assert [one.param_groups[0]["weight_decay"] for one in (muon, adamw)] == [0.1, 0.0]


def test_adamw_decays_the_matrices_of_blocks_alone() -> None:
    [adamw] = script.Training(run_of("sync", "adamw")).optimizers
    decays = [(group["weight_decay"], len(group["params"])) for group in adamw.param_groups]
    assert decays == [(0.1, 4), (0.0, 3 + 2 * 3)]


@pytest.mark.parametrize("shape", [(6, 16), (16, 6), (8, 8)])
def test_muon_is_torchs_but_for_bf16(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(shape, generator=generator)
    mine, other = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    ours = script.Muon([mine], 0.01, 0.1)
    torchs = torch.optim.Muon([other], 0.01, 0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        mine.grad = other.grad = torch.randn(shape, generator=generator)
        ours.step()
        torchs.step()
    moved, far = (mine - other).abs().max().item(), (mine - first).abs().max().item()
    assert moved < 0.03 * far


def test_spike_compensation_by_its_formula() -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = script.SpikeSGD([{"params": [weight], "delay": 3}], lr=0.1, momentum=0.9)
    expected, velocity = 1.0, 0.0
    for gradient in (0.5, -0.2, 0.8):
        weight.grad = torch.tensor([gradient], dtype=torch.float64)
        optimizer.step()
        velocity = 0.9 * velocity + gradient
        expected -= 0.1 * (0.9**3 * velocity + (1 + 0.9 + 0.9**2) * gradient)
        assert weight.item() == pytest.approx(expected, rel=1e-12)


def test_spike_compensation_without_a_delay_is_sgd() -> None:
    assert losses_of("backpropagation-spike", stages=1) == pytest.approx(
        losses_of("sync", stages=1), rel=1e-6
    )


# --- the text


def test_every_twentieth_file_is_held_out(tmp_path: Path) -> None:
    files = [tmp_path / f"{number:02}" for number in range(40)]
    for number, file in enumerate(files):
        file.write_bytes(bytes([number] * 3))
    text = script.Text.of_files(files)
    assert text.held_out.tolist() == [*[19] * 3, 256, *[39] * 3, 256]
    rest = [number for number in range(40) if number not in (19, 39)]
    assert text.training.tolist() == [token for at in rest for token in (at, at, at, 256)]


def test_windows_have_the_token_after_them() -> None:
    text = script.Text(torch.arange(50), torch.arange(100))
    first = next(text.batches(1, 3, 4))
    assert first.shape == (3, 5)
    assert (first[:, 1:] == first[:, :-1] + 1).all()
    assert torch.equal(first, next(text.batches(1, 3, 4)))
    assert not torch.equal(first, next(text.batches(2, 3, 4)))
    assert text.held_out_windows(3, 4)[:, 0].tolist() == [0, 31, 62]


# --- what it prints


def made_up(mode: str, seed: int, loss: float, optimizer: str = "muon") -> dict[str, Any]:
    found = {"parameters": 9, "finite": math.isfinite(loss), "held_out": [loss], "training": []}
    return {**run_of(mode, optimizer, seed=seed), **found, "cpu_seconds": 1.0}


def test_the_table_has_differences_of_equal_seeds_beside_the_published_ones() -> None:
    runs = [made_up("sync", 1, 2.0), made_up("sync", 2, 2.4)]
    runs += [made_up("delay", 2, 2.5), made_up("delay", 1, 2.3), made_up("partime", 1, math.nan)]
    runs += [made_up("sync", 0, 2.6, "adamw")]
    assert script.tables(runs) == [
        "muon, learning rate 0.2: 9 weights, 20 updates of 2 x 8 tokens",
        "",
        "| mode | stages | seeds | held-out loss | difference to sync | published |",
        "|---|--:|--:|--:|--:|--:|",
        "| sync |  | 2 | 2.2000 ± 0.2828 |  | 2.578; 1.906 |",
        "| delay |  | 2 | 2.4000 ± 0.1414 | +0.2000 ± 0.1414 | +0.012; +0.005 |",
        "| partime | 2 | 1 | no number |  |  |",
        "",
        "| optimizer | steps | learning rate | held-out loss |",
        "|---|--:|--:|--:|",
        "| adamw | 20 | 0.2 | 2.600 |",
    ]


@pytest.mark.long
def test_runs_are_kept_and_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "runs.json"
    words = [*TINY, "--steps", "20", "--optimizer", "muon", "--results", str(results)]
    first = run_script(PATH, *words, "--mode", "sync", "partime", "--seed", "1")
    assert first.code == 0, first.stderr
    printed = [json.loads(line) for line in first.stdout.splitlines()]
    assert [(run["mode"], run["stages"]) for run in printed] == [("sync", 2), ("partime", 4)]
    assert all(0 < run["held_out"][-1] < 6 and len(run["training"]) == 10 for run in printed)
    again = run_script(PATH, *words, "--mode", "sync", "feedback", "--seed", "1")
    assert [json.loads(line)["mode"] for line in again.stdout.splitlines()] == ["feedback"]
    kept = json.loads(results.read_text(encoding="utf-8"))
    assert [run["mode"] for run in kept["runs"]] == ["sync", "partime", "feedback"]
    assert set(kept) == {"machine", "commit", "date", "runs"}
    table = run_script(PATH, "--table", "--results", str(results))
    assert table.stdout.splitlines() == script.tables(kept["runs"])


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--steps", "19"], "--steps 19: too few to tell anything, give 20 or more"),
        (
            ["--mode", "backpropagation-spike"],
            "--mode backpropagation-spike changes the step of SGD: give --optimizer sgd",
        ),
        (["--heads", "5"], "--hidden 96 cannot be split among --heads 5"),
        (["--stages", "11"], "--stages 11: --layers 4 fill 10"),
    ],
)
def test_what_cannot_run_is_refused(words: list[str], refusal: str) -> None:
    done = run_script(PATH, *words)
    assert done.code == 2
    assert done.stderr.splitlines()[-1] == f"delayed_convergence.py: error: {refusal}"
