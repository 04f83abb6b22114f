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


class _Checked(NamedTuple):
    """What a rank has found: its difference nearest to the loss, with its stage, if any."""

    found: tuple[int, Difference] | None
    largest: float
    parameters: int
    layers: int


class Verification:
    """The comparison of one step; ``splits`` are those of the rank's chunks."""

    def __init__(self, splits: list[SplitBackward]) -> None:
        self._splits = splits
        self._expected: list[dict[str, torch.Tensor | None]] = []

    @contextmanager
    def unsplit(self, iteration: Iteration) -> Iterator[None]:
        """Run the step that is compared with inside, and put back what it has changed."""
        start = Start(iteration.data_iterators)
        usual, iteration.data_iterators = iteration.data_iterators, start.data_iterators
        buffers = [(b, b.clone()) for c in iteration.model for b in torch.nn.Module.buffers(c)]
        before = [_gradients(chunk) for chunk in iteration.model]
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
        self._expected = [_gradients(chunk) for chunk in iteration.model]
        start.go_back()
        iteration.forward_data_store.clear()
        iteration.total_num_tokens.zero_()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for chunk, gradients in zip(iteration.model, before, strict=True):
            _set_gradients(chunk, gradients)

    def check(self, iteration: Iteration, schedule: str) -> str:
        """Return what to say of the step that has run since; collective over the job.

        Raises:
            UsageError: a gradient differs; on all ranks, with the one that is nearest to the loss,
                as a fault of an input gradient spreads to all layers before it.
        """
        found: list[tuple[int, Difference]] = []
        largest = 0.0
        for number, chunk in enumerate(iteration.model):
            differ, most = _differences(self._expected[number], chunk)
            stage = iteration.physical.stage(iteration.pp_rank, number)
            found += [(stage, one) for one in differ[-1:]]
            largest = max(largest, most)
        mine = _Checked(
            found=max(found, default=None, key=lambda one: one[0]),
            largest=largest,
            parameters=sum(map(len, self._expected)),
            layers=sum(len(split.split_layers) for split in self._splits),
        )
        self._expected = []
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine)
        wrong = [(one.found, rank) for rank, one in enumerate(told) if one.found]
        if wrong:
            (_, worst), rank = max(wrong, key=lambda one: one[0][0])
            raise UsageError(_sentence(schedule, rank, worst))
        return (
            f"{VERIFY_FLAG}: the gradients of {sum(one.parameters for one in told)} parameters on "
            f"{len(told)} ranks, {sum(one.layers for one in told)} of split layers, are those of "
            "an unsplit backward; the largest difference is "
            f"{max(one.largest for one in told):.1e} of a gradient's norm"
        )


def _sentence(schedule: str, rank: int, worst: Difference) -> str:
    name, share, (expected, ours) = worst
    if not ours:
        wrong = f"is missing, where an unsplit backward has one of norm {expected:.3g}"
    else:
        wrong = (
            f"has a norm of {ours:.3g} and is off by {share:.1%} from that of an unsplit backward, "
            f"of norm {expected:.3g}"
        )
    return (
        f"{VERIFY_FLAG}: with --pipeline-schedule {schedule}, the gradient of {name} on rank "
        f"{rank} {wrong}: leave the schedule out or use 1f1b, and report this layer"
    )


def start_reductions(chunks: list[Any]) -> None:
    """Start the reductions of chunks that overlap them, for a step that has not done so."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_grad_reduce:
            chunk.start_grad_sync()


def _parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    for name, parameter in global_parameters(chunk).items():
        if parameter.requires_grad:
            yield name, parameter


def _gradients(chunk: Any) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients of a chunk's parameters on the host, None for zeros."""
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in _parameters(chunk):
        gradient = _gradient(parameter)
        there = gradient is not None and bool(gradient.any())
        found[name] = gradient.to("cpu", copy=True) if gradient is not None and there else None
    return found


def _gradient(parameter: Any) -> torch.Tensor | None:
    """Return a gradient as :func:`embedding.gradient_of`, None where there is none."""
    gradient: torch.Tensor | None = gradient_of(parameter)
    return None if gradient is None else gradient.detach()


def _set_gradients(chunk: Any, gradients: dict[str, torch.Tensor | None]) -> None:
    """Set gradients as they were, and let data parallelism count them anew."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.zero_grad_buffer()
    for name, parameter in _parameters(chunk):
        before = gradients[name]
        if not hasattr(parameter, "main_grad"):
            parameter.grad = None if before is None else before.to(parameter.device)
        elif before is not None:
            parameter.main_grad.copy_(before)


def _differences(
    expected: dict[str, torch.Tensor | None], chunk: Any
) -> tuple[list[Difference], float]:
    """Return the gradients that differ by more than is allowed, and the largest difference."""
    found, largest = [], 0.0
    for name, parameter in _parameters(chunk):
        mine, theirs = _gradient(parameter), expected[name]
        if mine is None and theirs is None:
            continue
        zero = torch.zeros(())
        ours = (zero if mine is None else mine).float()
        reference = (zero if theirs is None else theirs.to(ours.device)).float()
        norms = float(reference.norm()), float(ours.norm())
        if not any(norms):
            continue
        share = _off(ours, reference) / (norms[0] or norms[1])
        largest = max(largest, share)
        if not share <= TOLERANCE.get(parameter.dtype, TOLERANCE_16_BITS):
            found.append(Difference(name, share, norms))
    return found, largest


def _off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of a difference; numbers that are not finite in both are equal."""
    both = ~(mine.isfinite() | theirs.isfinite())
    return float((mine - theirs).masked_fill(both, 0.0).norm())
