"""Warm-up before the first step of training: ``--pipeline-warm-up``.

Kernels compile and tune themselves, and communicators connect, when they are first used. In a step
that happens on one stage after another, so the first step takes as many times longer as there are
stages. Here every stage runs its kinds of passes once before the step, all stages at once, and
everything that these passes change is put back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch

from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.rehearsal import undone
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.step import Step, StepPart, device, on_gpu, say_on_first_rank
from megatron_zb.runtime.observer import NOTHING
from megatron_zb.runtime.warm_up import MadeUpMessages, warm_up_program
from megatron_zb.schedules.passes import Message

FLAG = "--pipeline-warm-up"
_UNKNOWN_SHAPES = "only the sender of a message knows its shape"


class WarmUp(StepPart):
    """Runs a few passes of every stage before the first step of training.

    Args:
        splits: those of the rank's chunks.
        always: on CPU ranks as well; otherwise on GPUs only.
    """

    def __init__(self, splits: Sequence[SplitBackward], *, always: bool) -> None:
        self._splits, self._always = splits, always
        self._is_due = True

    def around(self, step: Step) -> AbstractContextManager[None]:
        """Warm up before the contexts of other parts."""
        if self._is_due and not (step.forward_only or step.is_rehearsal or step.captured):
            self._is_due = False
            if self._always or on_gpu():
                self._begin(step)
        return NOTHING

    def _begin(self, step: Step) -> None:
        if (why := why_cold(step)) is not None:
            say_on_first_rank(f"no warm-up before the first step: {why}")
            return
        start = time.perf_counter()
        self._run(step)
        seconds = time.perf_counter() - start
        say_on_first_rank(f"{FLAG}: every stage has run its passes once, in {seconds:.1f} s")

    def _run(self, step: Step) -> None:
        """Run the passes, and undo everything that they have changed."""
        program = warm_up_program(step.program, step.logical, alike=step.shapes is None)
        noise = _Noise(step.physical.placement.num_stages)
        try:
            with undone(step):
                step.run(
                    replace(
                        step,
                        program_for=lambda *_: program,
                        made_up=MadeUpMessages(noise.fill),
                        is_rehearsal=True,
                        forward_data_store=[],
                        total_num_tokens=torch.zeros_like(step.total_num_tokens),
                    )
                )
        finally:
            for split in self._splits:
                split.has_looked = False  # the graph of a real forward may have more


def why_cold(step: Step) -> str | None:
    """Return why a step has no warm-up, None if it may have one."""
    if step.shapes_vary:
        return _UNKNOWN_SHAPES
    facts = {part.fact: True for part in step.parts if part.fact}
    return refusals.why_cold(step.config, facts)


class _Noise:
    """Contents of messages in a warm-up: noise for activations, zeros for everything else.

    A router would send all tokens of zeros to the same experts, whose ranks could not hold them.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages  # others are shards of the vocabulary, which read labels
        self._generator = torch.Generator(device=torch.empty(0, device=device()).device)
        self._generator.manual_seed(0)

    def fill(self, message: Message, tensor: torch.Tensor) -> None:
        """Set the contents of a message."""
        is_activation = not message.is_gradient and message.stage < self._num_stages
        if is_activation and tensor.is_floating_point():
            tensor.normal_(generator=self._generator)
        else:
            tensor.zero_()
