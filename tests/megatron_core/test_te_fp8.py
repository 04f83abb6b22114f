"""Transformer-Engine's modules in fp8 and fp4 with their backward split.

The recipes are its own. Two are pure Python as they are; for the others, what a GPU's kernels do
is done in torch, see ``te_quantization``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drawn_sizes import every_value
from ranks import RankPool
from te_cases import (
    COLUMN,
    DEFERRED,
    MIXED,
    NAMES_OF_SEQUENCE_PARALLEL,
    NO_W_YET,
    RECIPES,
    ROW,
    SEQUENCE_PARALLEL,
    TAKES,
    TOKENS,
    WHOLE,
    WIDER,
    WIDTH,
    Case,
    Run,
    gradients,
    gradients_in_torch,
    unlike,
)

KINDS = ["Linear", "LayerNormLinear", "LayerNormMLP-relu", "GroupedLinear"]

# Of the largest gradient. The reference of nvfp4 rotates weights as well, which B does not undo.
QUANTIZED = 0.4


def in_bf16(kind: str, recipe: str, **more: Any) -> Case:
    return Case(kind, torch.bfloat16, recipe=recipe, **more)


def compare(kind: str, recipe: str) -> list[str]:
    """Every taker of gradients: deferred, whole and mixed passes."""
    found = []
    plain = gradients_in_torch(Case(kind, torch.bfloat16), 3)
    for fused, takes in TAKES:
        case = in_bf16(kind, recipe, fused=fused, takes=takes)
        whole = gradients(case, WHOLE)
        problems = unlike(gradients(case, DEFERRED), whole)
        problems += unlike(gradients(case, MIXED), whole, 0.02)
        if recipe != "nvfp4-reference":
            problems += unlike(whole, plain, QUANTIZED)
        if not unlike(whole, plain, 0.02):
            problems.append("nothing was quantised")
        found += [f"{case}: {problem}" for problem in problems]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recipe"), every_value(KINDS, RECIPES))
def test_deferred_weight_gradients_equal_those_of_a_whole_backward(
    te_pool: RankPool, kind: str, recipe: str
) -> None:
    assert te_pool.run(compare, kind=kind, recipe=recipe) == [[], []]


def compare_quantized_weights(kind: str, recipe: str) -> list[str]:
    found = []
    for fused, takes in TAKES[1:]:
        case = in_bf16(kind, recipe, fused=fused, takes=takes, quantized=True)
        found += unlike(gradients(case, DEFERRED), gradients(case, WHOLE))
    return found


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_weights_that_are_kept_in_fp8(te_pool: RankPool, kind: str, recipe: str) -> None:
    """As with --fp8-param-gather: the parameter itself is one of TE's quantised tensors."""
    assert te_pool.run(compare_quantized_weights, kind=kind, recipe=recipe) == [[], []]


def histories(order: str) -> list[bytes]:
    """The maxima and scales of delayed scaling after five steps."""
    run = Run(in_bf16("LayerNormMLP-relu", "delayed", takes="main_grad"))
    for _ in range(5):
        run.run(order)
    states = [run.module.fp8_meta[f"scaling_{way}"] for way in ("fwd", "bwd")]
    assert all(state.scale.ne(1).any() for state in states)
    kept = [tensor for state in states for tensor in (state.amax_history, state.scale)]
    return [tensor.numpy().tobytes() for tensor in kept]


def test_delayed_scaling_does_not_depend_on_where_w_runs(te_pool: RankPool) -> None:
    expected = te_pool.run(histories, order="F0 F1 BW0 F2 BW1 BW2")
    for order in ("F0 F1 B0 F2 B1 B2 W0 W1 W2", "F0 F1 B0 W0 F2 B1 BW2 W1"):
        assert te_pool.run(histories, order=order) == expected


def held(kind: str, recipe: str) -> tuple[int, int]:
    """Bytes held between B and W, and after W."""
    run = Run(in_bf16(kind, recipe)).run(NO_W_YET)
    live = run.memory.live_bytes
    run.run("W0 W1 W2")
    return live, run.memory.live_bytes


@pytest.mark.parametrize(
    ("recipe", "bits", "scales"),
    [("delayed", 8, 0.01), ("current", 8, 0.01), ("mxfp8", 8, 0.3), ("nvfp4-reference", 4, 0.3)],
)
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_w_waits_with_columns_of_so_many_bits(
    te_pool: RankPool, kind: str, recipe: str, bits: int, scales: float
) -> None:
    """The rows of the output gradient, which are for B alone, are gone; scales take a little."""
    data = 3 * TOKENS * (WIDTH + WIDER) * bits // 8
    for live, afterwards in te_pool.run(held, kind=kind, recipe=recipe):
        assert data < live <= data * (1 + scales)
        assert afterwards == 0


def compare_sequence_parallel(kind: str, options: dict[str, Any], recipe: str) -> list[str]:
    found = []
    for fused in (False, True):
        case = in_bf16(kind, recipe, fused=fused, takes="main_grad", options=tuple(options.items()))
        whole = gradients(case, WHOLE)
        found += unlike(gradients(case, DEFERRED), whole)
        found += unlike(gradients(case, MIXED), whole, 0.02)
    return found


@pytest.mark.parametrize(("name", "recipe"), every_value(NAMES_OF_SEQUENCE_PARALLEL, RECIPES))
def test_sequence_parallel_gradients_equal_those_of_a_whole_backward(
    te_pool: RankPool, name: str, recipe: str
) -> None:
    kind, options = SEQUENCE_PARALLEL[NAMES_OF_SEQUENCE_PARALLEL.index(name)]
    found = te_pool.run(compare_sequence_parallel, kind=kind, options=options, recipe=recipe)
    assert found == [[], []]


def held_with_options(kind: str, options: dict[str, Any]) -> int:
    case = in_bf16(kind, "current", options=tuple(options.items()))
    return Run(case).run("F0 B0").memory.live_bytes


@pytest.mark.parametrize(
    ("options", "numbers"),
    [(COLUMN, 2 * WIDTH + 2 * WIDER // 2), (ROW, 2 * WIDTH // 2 + 2 * WIDER)],
    ids=["column", "row"],
)
def test_what_sequence_parallelism_gathers_is_held_and_counted_whole(
    te_pool: RankPool, options: dict[str, Any], numbers: int
) -> None:
    """Bytes of each token that a rank has, in fp8, and a few for the scales."""
    for live in te_pool.run(held_with_options, kind="Linear", options=options):
        assert TOKENS * numbers < live <= TOKENS * numbers + 16


def weights_quantized(requantizes: bool) -> tuple[list[int], list[str]]:
    """How often each pass quantises the weight in two steps, and what gradients are unlike.

    Megatron tells its layer which microbatch is the first.
    """
    case = in_bf16("TEColumnParallelLinear", "current", fused=True, takes="main_grad")
    counts: list[int] = []
    found = []
    for order in ("F0 F1 B0 BW1 W0", "F0 F1 BW0 BW1"):
        run = Run(case)
        run.module.disable_parameter_transpose_cache = requantizes
        for _ in range(2):
            run.module.is_first_microbatch = True  # as set_is_first_microbatch does
            for one in order.split():
                with counting(run.module.weight) as seen:
                    run.run(one)
                counts.append(len(seen))
            run.module.weight.data.mul_(-2)  # the optimizer steps
        found.append(run.gradients())
    deferred, whole = found
    return counts, unlike(deferred, whole, 0.01)


@contextmanager
def counting(weight: torch.Tensor) -> Iterator[list[None]]:
    """Count how often a weight is quantised."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    seen: list[None] = []
    usual = Float8CurrentScalingQuantizer.quantize_impl

    def quantize_impl(self: Any, tensor: torch.Tensor) -> Any:
        seen.extend([None] * (tensor.data_ptr() == weight.data_ptr()))
        return usual(self, tensor)

    Float8CurrentScalingQuantizer.quantize_impl = quantize_impl
    try:
        yield seen
    finally:
        Float8CurrentScalingQuantizer.quantize_impl = usual


@pytest.mark.parametrize(("requantizes", "in_second_f"), [(False, 0), (True, 1)])
def test_a_weight_is_quantized_in_the_first_forward_of_a_step(
    te_pool: RankPool, requantizes: bool, in_second_f: int
) -> None:
    """Or in every forward, if asked for; and no weight gradient replaces an earlier one."""
    expected = [1, in_second_f, 0, 0, 0] * 2 + [1, in_second_f, 0, 0] * 2
    found = te_pool.run(weights_quantized, requantizes=requantizes)
    assert found == [(expected, [])] * 2
