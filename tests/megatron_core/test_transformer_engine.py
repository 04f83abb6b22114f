"""Transformer-Engine's own modules with their backward split, over stand-ins for its kernels."""

from __future__ import annotations

import weakref
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import RankPool
from te_cases import (
    DEFERRED,
    MIXED,
    NO_W_YET,
    SPLITS,
    TAKES,
    TOKENS,
    TOLERANCE,
    WHOLE,
    WIDER,
    WIDTH,
    Case,
    Run,
    build,
    gradients,
    gradients_in_torch,
    loss,
    microbatch_of,
    unlike,
)
from torch.nn.utils.parametrize import register_parametrization

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import transformer_engine
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.transformer_engine import split_transformer_engine
from megatron_zb.megatron_core.versions import transformer_engine_is_supported
from megatron_zb.runtime.autograd_stage import WeightGradQueue

# TE makes the gradient of fc1's bias in B for its fused gelu, and in W for other activations.
KINDS = ["Linear", "LayerNormLinear", "LayerNormMLP-gelu", "LayerNormMLP-relu", "GroupedLinear"]


def compare_everywhere(kind: str) -> list[str]:
    """A module in every type, for every taker of gradients: deferred, whole and mixed passes."""
    found = []
    for dtype, tolerance in TOLERANCE.items():
        expected = gradients_in_torch(Case(kind, dtype), 3)
        for fused, takes in TAKES:
            case = Case(kind, dtype, fused, takes)
            whole = gradients(case, WHOLE)
            problems = unlike(whole, expected, tolerance)
            problems += unlike(gradients(case, MIXED), expected, tolerance)
            problems += unlike(gradients(case, DEFERRED), whole)
            found += [f"{case}: {problem}" for problem in problems]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "TEColumnParallelLinear"])
def test_gradients_equal_torchs(te_pool: RankPool, kind: str) -> None:
    """And those of deferred W equal those of BW, bit for bit.

    Megatron's layer makes its bias anew after TE has built it, and its data parallelism knows
    nothing of a delay here: the bias's gradient must be there all the same.
    """
    assert te_pool.run(compare_everywhere, kind=kind) == [[], []]


def triple(module: Any, name: str) -> None:
    module._parameters[name].register_hook(lambda gradient: 3 * gradient)


def halve(module: Any, name: str) -> None:
    register_parametrization(module, name, Half(), unsafe=True)


class Half(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 0.5 * weight


USER_CHANGES: dict[str, tuple[Any, str]] = {
    "hook": (triple, "its weight has a hook"),
    "parametrization": (halve, "its weight is computed from other tensors"),
}


def compare_changed(kind: str, name: str, change: str) -> list[str]:
    """A module that a user changes after it was split: deferred as whole passes, bit for bit.

    A parametrization gives a weight another accumulator, whose gradients Megatron's data
    parallelism does not see if it has wrapped the module before.
    """
    found = []
    for takes in ("autograd", *(["overlapping-ddp"] if change == "hook" else [])):
        runs = []
        for passes in (WHOLE, DEFERRED):
            run = Run(Case(kind, torch.float32, takes=takes))
            USER_CHANGES[change][0](run.module, name)
            runs.append(run.run(passes))
        found += unlike(runs[1].gradients(), runs[0].gradients())
        reasons = {layer: unsplit.reason for layer, unsplit in runs[1].split.unsplit.items()}
        if reasons != {"layer": USER_CHANGES[change][1]}:
            found.append(f"named {reasons}")
        missing = [name for name, of in runs[1].gradients().items() if not of.any()]
        found += [f"no gradient of {name} for {takes}" for name in missing]
    return found


@pytest.mark.parametrize("change", USER_CHANGES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [("Linear", "weight"), ("LayerNormMLP-relu", "fc1_weight"), ("GroupedLinear", "weight1")],
)
def test_a_module_that_a_user_has_changed_stays_whole(
    te_pool: RankPool, kind: str, name: str, change: str
) -> None:
    found = te_pool.run(compare_changed, kind=kind, name=name, change=change)
    assert found == [[], []]


def compare_options(case: Case) -> list[str]:
    expected = gradients_in_torch(case, 3)
    return unlike(gradients(case, DEFERRED), expected, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"return_bias": True},
        {"parameters_split": ("a_", "b_")},
    ],
    ids=str,
)
@pytest.mark.parametrize("takes", ["autograd", "main_grad"])
def test_options_of_linear(te_pool: RankPool, options: dict[str, Any], takes: str) -> None:
    """A weight that is split into parameters would lose its gradient in TE's W: it stays in B."""
    case = Case("Linear", takes=takes, options=tuple(options.items()))
    assert te_pool.run(compare_options, case=case) == [[], []]


def can_split(**options: bool) -> bool:
    from transformer_engine import pytorch as te

    if not options.keys() <= signature(te.GroupedLinear.__init__).parameters.keys():
        return False  # this version has no such experts
    return transformer_engine._can_split(te.GroupedLinear(2, 8, 8, device="cpu", **options))


def test_experts_in_one_tensor_stay_whole(te_pool: RankPool) -> None:
    assert te_pool.run(can_split) == [True, True]
    assert te_pool.run(can_split, use_grouped_tensor=True) == [False, False]


def compare_frozen(case: Case) -> list[str]:
    expected = gradients_in_torch(case, 3)
    run = Run(case).run(DEFERRED)
    found = unlike(run.gradients(), zeroed(expected, case.frozen), 1e-5)
    return found if not run.memory.peak_bytes else [*found, "weight gradients were queued"]


def zeroed(gradients: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(g) if n in names else g for n, g in gradients.items()}


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("Linear", ("weight", "bias")),
        ("LayerNormMLP-relu", ("fc1_weight", "fc1_bias")),
        ("GroupedLinear", ("weight0", "weight1", "bias0", "bias1")),
    ],
)
def test_frozen_weights_stay_out(te_pool: RankPool, kind: str, frozen: tuple[str, ...]) -> None:
    """A module of which only a part is frozen does all in B."""
    assert te_pool.run(compare_frozen, case=Case(kind, frozen=frozen)) == [[], []]


def names_without_gradient(kind: str) -> set[str]:
    run = Run(Case(kind, takes="main_grad")).run(NO_W_YET)
    return {name for name, gradient in run.gradients().items() if not gradient.any()}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Linear", "weight bias"),
        ("LayerNormLinear", "weight bias"),
        ("LayerNormMLP-gelu", "fc1_weight fc2_weight fc2_bias"),
        ("LayerNormMLP-relu", "fc1_weight fc1_bias fc2_weight fc2_bias"),
        ("GroupedLinear", "weight0 weight1 bias0 bias1"),
    ],
)
def test_b_leaves_weights_and_their_biases_to_w(te_pool: RankPool, kind: str, names: str) -> None:
    """TE's weight-gradient kernel makes the bias's gradient, too."""
    assert te_pool.run(names_without_gradient, kind=kind) == [set(names.split())] * 2


def bytes_held(kind: str, passes: str) -> tuple[int, int, int]:
    memory = (run := Run(Case(kind)).run(passes)).memory
    live = memory.live_bytes
    for microbatch in range(len(run.queue)):
        run.W(microbatch)
    return live, memory.live_bytes, memory.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_backward_queues_nothing(te_pool: RankPool, kind: str) -> None:
    assert te_pool.run(bytes_held, kind=kind, passes=WHOLE) == [(0, 0, 0)] * 2


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_what_is_held_until_w_is_counted(te_pool: RankPool, kind: str) -> None:
    held = 3 * TOKENS * (WIDTH + WIDER) * 4
    assert te_pool.run(bytes_held, kind=kind, passes=NO_W_YET) == [(held, 0, held)] * 2


def stage_input_is_gone_after_b(kind: str) -> bool:
    run = Run(Case(kind))
    x = microbatch_of(run.case, 0)
    more = [SPLITS] if kind == "GroupedLinear" else []
    y = loss(run.module(x * 2, *more))
    with run.queue.collecting(0):
        y.backward()
    assert x.grad is not None
    seen = weakref.ref(x)
    del x, y
    assert len(run.queue) == 1
    return seen() is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_for_w_does_not_keep_the_input_of_the_stage(
    te_pool: RankPool, kind: str
) -> None:
    """Its graph leads there: one more message would be held for each W that is left."""
    assert te_pool.run(stage_input_is_gone_after_b, kind=kind) == [True] * 2


def first_microbatch_last() -> list[str]:
    """Megatron tells TE which microbatch is the first; fused, TE lets it overwrite main_grad."""
    case = Case("TEColumnParallelLinear", fused=True, takes="main_grad")
    return unlike(gradients(case, "F0 F1 B0 BW1 W0"), gradients_in_torch(case, 2), 1e-5)


def test_the_first_microbatch_adds_to_main_grad(te_pool: RankPool) -> None:
    assert te_pool.run(first_microbatch_last) == [[], []]


def gradients_around_b() -> list[str]:
    run = Run(Case("GroupedLinear")).run("F0 BW0")
    before = {name: g for name, g in run.gradients().items() if name.startswith("weight")}
    return unlike(run.run("F1 B1").gradients(), before)


def test_b_of_experts_leaves_the_gradients_there_are(te_pool: RankPool) -> None:
    """TE's B returns memory that W is to fill as the gradient; autograd would add it."""
    assert te_pool.run(gradients_around_b) == [[], []]


def refusal(setting: str) -> str:
    import transformer_engine

    run = Run(Case("Linear"))
    chunk: Any = torch.nn.ModuleDict({"layer": build(run.case)})
    if setting == "bulk":
        chunk["layer"].ub_bulk_wgrad = True
    if setting == "fuser":
        from megatron.core.extensions.transformer_engine import TEFusedMLP

        chunk.config = SimpleNamespace(use_transformer_engine_op_fuser=True)
        chunk["mlp"] = TEFusedMLP.__new__(TEFusedMLP)
        torch.nn.Module.__init__(chunk["mlp"])
    if setting == "zero-copy":
        chunk["experts"] = torch.nn.Module()
        chunk["experts"]._with_fused_impl = True
        chunk["experts"].config = SimpleNamespace(moe_ncclep_zero_copy=True)
    if setting == "operation":
        from transformer_engine.pytorch import ops

        chunk["operation"] = ops.BasicLinear(WIDTH, WIDER, device="cpu", dtype=torch.float32)
    version = transformer_engine.__version__
    if setting == "version":
        transformer_engine.__version__ = "2.2.1"
    try:
        split_transformer_engine(chunk, SplitBackward(WeightGradQueue()), "v-half")
    except UsageError as error:
        return str(error)
    finally:
        transformer_engine.__version__ = version
    return "not refused"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "bulk",
            "--tp-comm-overlap cannot be combined with --pipeline-schedule v-half while it "
            "overlaps communication of B with the weight gradient: add "
            "--disable-tp-comm-bulk-wgrad",
        ),
        *(
            (
                setting,
                f"{said} cannot be combined with --pipeline-schedule v-half: "
                "operations of transformer_engine.pytorch.ops, except those of grouped experts, "
                "compute weight gradients in B",
            )
            for setting, said in (
                ("fuser", "--use-transformer-engine-op-fuser"),
                ("operation", "a BasicLinear"),
            )
        ),
        (
            "zero-copy",
            "--moe-ncclep-zero-copy cannot be combined with --pipeline-schedule v-half: "
            "B of the experts overwrites the output gradient that W reads; leave it out",
        ),
        (
            "version",
            "--pipeline-schedule v-half needs Transformer-Engine 2.3 or newer, which can defer "
            "weight gradients, but 2.2.1 is installed",
        ),
    ],
)
def test_refused(te_pool: RankPool, setting: str, text: str) -> None:
    assert te_pool.run(refusal, setting=setting) == [text] * 2


def test_versions() -> None:
    served = {"2.3.0": True, "2.20.2": True, "2.9.0+70f5366": True, "2.2.1": False, "1.13": False}
    assert {v: transformer_engine_is_supported(v) for v in served} == served
