"""Transformer-Engine's modules under sequence parallelism: what B leaves to W, and its buffers."""

from __future__ import annotations

import time
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from te_cases import (
    COLUMN,
    DEFERRED,
    MIXED,
    NAMES_OF_SEQUENCE_PARALLEL,
    ROW,
    SEQUENCE_PARALLEL,
    TAKES,
    TOKENS,
    TOLERANCE,
    WHOLE,
    WIDER,
    WIDTH,
    Case,
    Run,
    gradients,
    unlike,
)


def compare_with_whole(kind: str, options: dict[str, Any]) -> list[str]:
    found = []
    for dtype in TOLERANCE:
        for fused, takes in TAKES[:2] + TAKES[4:5]:
            case = Case(kind, dtype, fused, takes, tuple(options.items()))
            whole = gradients(case, WHOLE)
            for passes in (DEFERRED, MIXED):
                problems = unlike(gradients(case, passes), whole)
                found += [f"{case} {passes}: {problem}" for problem in problems]
    return found


@pytest.mark.parametrize(("kind", "options"), SEQUENCE_PARALLEL, ids=NAMES_OF_SEQUENCE_PARALLEL)
def test_sequence_parallel_gradients_equal_those_of_a_whole_backward(
    te_pool: RankPool, kind: str, options: dict[str, Any]
) -> None:
    assert te_pool.run(compare_with_whole, kind=kind, options=options) == [[], []]


def after_b_of_sequence_parallel(kind: str, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that are held, and how many of the gathered tensors there still are."""
    from transformer_engine.pytorch.module import base, layernorm_linear, layernorm_mlp, linear

    modules: list[Any] = [base, layernorm_linear, layernorm_mlp, linear]
    gather = linear.gather_along_first_dim
    gathered: list[weakref.ref[torch.Tensor]] = []

    def recorded(*args: Any, **more: Any) -> Any:
        result = gather(*args, **more)
        gathered.append(weakref.ref(result[0]))
        return result

    for module in modules:
        module.gather_along_first_dim = recorded
    try:
        run = Run(Case(kind, options=tuple(options.items()))).run("F0 B0")
        assert gathered
        until = time.monotonic() + 5  # gloo's thread lets go of a tensor a moment later
        while any(one() is not None for one in gathered) and time.monotonic() < until:
            time.sleep(0.01)
        return run.memory.live_bytes, sum(one() is not None for one in gathered)
    finally:
        for module in modules:
            module.gather_along_first_dim = gather


@pytest.mark.parametrize(
    ("kind", "options", "numbers"),
    [
        (*case, TOKENS * numbers)
        for case, numbers in zip(
            SEQUENCE_PARALLEL,
            [
                WIDTH + 2 * WIDER // 2,
                WIDTH + 2 * WIDER // 2,
                2 * WIDTH // 2 + WIDER,
                (WIDTH + 2 * WIDER // 2) + (2 * WIDER // 2 + WIDTH),
            ],
            strict=True,
        )
    ],
    ids=NAMES_OF_SEQUENCE_PARALLEL,
)
def test_what_sequence_parallelism_gathers_is_held_as_a_shard(
    te_pool: RankPool, kind: str, options: dict[str, Any], numbers: int
) -> None:
    """Of each token that a rank has: the input of a column, the output gradient of a row."""
    found = te_pool.run(after_b_of_sequence_parallel, kind=kind, options=options)
    assert found == [(numbers * 4, 0)] * 2


class UserBuffer:
    """One of TE's communication buffers, shared by all layers of a name; it gathers at once."""

    def __init__(self, fp8: bool) -> None:
        self._fp8 = fp8
        self._memory = torch.full((1,), torch.nan).repeat(4 * TOKENS * WIDER)
        if fp8:
            self._memory = self._memory.to(torch.float8_e4m3fn).view(torch.uint8)
        self.uses = 0

    def with_cublasmp(self) -> bool:
        return False

    def is_fp8_ubuf(self) -> bool:
        return self._fp8

    def copy_into_buffer(self, local: torch.Tensor, local_chunk: bool) -> None:
        assert local_chunk
        self.uses += 1
        gathered = self._memory[: 2 * local.numel()].view(-1, *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.detach().contiguous())

    def get_buffer(self, shape: list[int]) -> torch.Tensor:
        return self._memory[: torch.Size(shape).numel()].view(shape)


def compare_user_buffers(
    kind: str, options: dict[str, Any], overlap: str, recipe: str | None
) -> tuple[list[str], int]:
    from transformer_engine.pytorch.module import base

    dtype = torch.bfloat16 if recipe else torch.float32
    case = Case(kind, dtype, recipe=recipe, options=tuple(options.items()))
    expected = gradients(case, WHOLE)
    modes, buffer = base.UserBufferQuantizationMode, UserBuffer(recipe is not None)
    key = ("layer_dgrad", modes.FP8 if recipe else modes.NONE)
    base._ub_initialized, base._ub_communicators = True, {key: buffer}
    try:
        more = {overlap: True, "ub_name": "layer"}
        case = replace(case, options=tuple({**options, **more}.items()))
        return unlike(gradients(case, DEFERRED), expected), buffer.uses
    finally:
        base._ub_initialized, base._ub_communicators = False, None


@pytest.mark.parametrize(
    ("kind", "options", "overlap", "recipe"),
    [
        ("Linear", COLUMN, "ub_bulk_dgrad", None),
        ("LayerNormLinear", COLUMN, "ub_bulk_dgrad", None),
        ("Linear", ROW, "ub_overlap_ag", None),
        ("Linear", COLUMN, "ub_bulk_dgrad", "mxfp8"),
        ("LayerNormLinear", COLUMN, "ub_bulk_dgrad", "mxfp8"),
        ("Linear", ROW, "ub_overlap_ag", "current"),
    ],
    ids=[
        "column",
        "column-with-norm",
        "row",
        "column-mxfp8",
        "column-with-norm-mxfp8",
        "row-current",
    ],
)
def test_w_does_not_read_buffers_that_the_next_b_fills_anew(
    te_pool: RankPool, kind: str, options: dict[str, Any], overlap: str, recipe: str | None
) -> None:
    """TE hands W what it has gathered as a view of a buffer that layers share."""
    arguments: dict[str, Any] = {
        "kind": kind,
        "options": options,
        "overlap": overlap,
        "recipe": recipe,
    }
    found = te_pool.run(compare_user_buffers, **arguments)
    assert [problems for problems, _ in found] == [[], []]
    assert [uses for _, uses in found] == [3, 3]
