"""Comparison of a step's gradients with those of the same step with nothing split.

``--pipeline-verify`` runs the first step of training twice: once with every weight gradient in B,
by Megatron's own functions, and its reductions at the end; then as it will run from then on. Data,
random numbers, buffers and logged losses are put back in between. A layer whose gradient is lost,
doubled, computed from the wrong tensors or reduced too early then differs by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel

from megatron_zb.errors import UsageError
from megatron_zb.job.run_flags import VERIFY_FLAG
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.embedding import gradient_of
from megatron_zb.megatron_core.initialisation import global_parameters
from megatron_zb.megatron_core.redo import Start
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.stages import Iteration

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""The most that a gradient may differ, as a share of its norm, by the type of its weight. Both
steps run the same kernels in the same order, so only kernels whose sums have no fixed order, such
as those of an attention's backward, give a difference at all."""
TOLERANCE_16_BITS = 2e-3


class Difference(NamedTuple):
    """A parameter whose gradients differ, by a share of the norm of the unsplit one."""

    name: str
    share: float
    norms: tuple[float, float]


class Verification:
    """The comparison of one step; ``splits`` are those of the rank's chunks."""

    def __init__(self, splits: list[SplitBackward]) -> None:
        self._splits = splits
        self._expected: dict[str, torch.Tensor | None] = {}

    @contextmanager
    def unsplit(self, iteration: Iteration) -> Iterator[None]:
        """Run the step that is compared with inside, and put back what it has changed."""
        start = Start(iteration.data_iterators)
        usual, iteration.data_iterators = iteration.data_iterators, start.data_iterators
        buffers = [(b, b.clone()) for c in iteration.model for b in torch.nn.Module.buffers(c)]
        before = _gradients(iteration.model)
        for split in self._splits:
            split.is_off = True
        try:
            with versions.losses_logged_apart():
                yield
        except BaseException:
            iteration.data_iterators = usual
            raise
        finally:
            for split in self._splits:
                split.is_off = False
        self._expected = _gradients(iteration.model)
        start.go_back()
        iteration.forward_data_store.clear()
        iteration.total_num_tokens.zero_()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        _set_gradients(iteration.model, before)

    def check(self, iteration: Iteration, schedule: str) -> str:
        """Return what to say of the step that has run since; collective over the job.

        Raises:
            UsageError: a gradient differs; on all ranks, with the first one that has been found.
        """
        found, largest = _differences(self._expected, iteration.model)
        split = sum(1 for one in self._splits for _ in one.split_layers)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (found[:1], len(found), largest, len(self._expected), split))
        self._expected = {}
        worst = next(((rank, *one) for rank, one in enumerate(told) if one[0]), None)
        if worst is not None:
            raise UsageError(_sentence(schedule, worst[0], worst[1][0], sum(t[1] for t in told)))
        parameters, layers = (sum(one[i] for one in told) for i in (3, 4))
        return (
            f"{VERIFY_FLAG}: the gradients of {parameters} parameters on {len(told)} ranks, "
            f"{layers} of split layers, are those of an unsplit backward; the largest difference "
            f"is {max(one[2] for one in told):.1e} of a gradient's norm"
        )


def _sentence(schedule: str, rank: int, worst: Difference, count: int) -> str:
    name, share, (expected, ours) = worst
    others = f", as are those of {count - 1} other parameters" if count > 1 else ""
    if not ours:
        wrong = f"is missing, where an unsplit backward has one of norm {expected:.3g}"
    else:
        wrong = (
            f"has a norm of {ours:.3g} and is off by {share:.1%} from that of an unsplit backward, "
            f"of norm {expected:.3g}"
        )
    return (
        f"{VERIFY_FLAG}: with --pipeline-schedule {schedule}, the gradient of {name} on rank "
        f"{rank} {wrong}{others}: leave the schedule out or use 1f1b, and report this layer"
    )


def start_reductions(chunks: list[Any]) -> None:
    """Start the reductions of chunks that overlap them, for a step that has not done so."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()


def _parameters(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        module = chunk
        while hasattr(module, "module"):
            module = module.module
        for name, parameter in global_parameters(module).items():
            if parameter.requires_grad:
                yield (name if len(chunks) == 1 else f"{name} (chunk {number})"), parameter


def _gradients(chunks: list[Any]) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients of all parameters on the host, None for zeros."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in _parameters(chunks):
        gradient = gradient_of(parameter)
        there = gradient is not None and bool(gradient.any())
        found[name] = gradient.detach().to("cpu", copy=True) if there else None
    return found


def _set_gradients(chunks: list[Any], gradients: dict[str, torch.Tensor | None]) -> None:
    """Set gradients as they were, and let data parallelism count them anew."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.zero_grad_buffer()
    for name, parameter in _parameters(chunks):
        before = gradients[name]
        if not hasattr(parameter, "main_grad"):
            parameter.grad = None if before is None else before.to(parameter.device)
        elif before is not None:
            parameter.main_grad.copy_(before)


def _differences(
    expected: dict[str, torch.Tensor | None], chunks: list[Any]
) -> tuple[list[Difference], float]:
    """Return the gradients that differ by more than is allowed, and the largest difference."""
    found, largest = [], 0.0
    for name, parameter in _parameters(chunks):
        mine, theirs = gradient_of(parameter), expected[name]
        norms = tuple(0.0 if g is None else float(g.float().norm()) for g in (theirs, mine))
        if norms == (0.0, 0.0):
            continue
        if mine is None or theirs is None:
            off = max(norms)
        else:
            off = _off(mine.detach().float(), theirs.to(mine.device).float())
        share = off / (norms[0] or norms[1])
        largest = max(largest, share)
        if not share <= TOLERANCE.get(parameter.dtype, TOLERANCE_16_BITS):
            found.append(Difference(name, share, (norms[0], norms[1])))
    return found, largest


def _off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of a difference; numbers that are not finite in both are equal."""
    both = ~(mine.isfinite() | theirs.isfinite())
    return float((mine - theirs).masked_fill(both, 0.0).norm())
