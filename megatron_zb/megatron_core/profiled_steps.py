"""Steps that are measured for a profile, with marks between the parts of a model's passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.measured.parts import AFTER, BEFORE, DATA, ENCODER, LAYERS, MULTI_TOKEN, OUTPUT
from megatron_zb.megatron_core.model_ends import language_model
from megatron_zb.megatron_core.profiling import Measured, Profiling
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.step import Step, StepPart, device, on_gpu
from megatron_zb.runtime.link_times import clock_ahead, copy_times, link_times
from megatron_zb.runtime.observer import Observer
from megatron_zb.runtime.offload import HostMemory
from megatron_zb.runtime.weight_grad import WeightGradQueue

Mark = Callable[[str], None]


class ProfilePart(StepPart):
    """Measures the passes and links of the first steps of training.

    Args:
        start: called at the first step of training, when the process groups exist.
        use: called with every complete profile, between two steps.
        splits: those of the rank's chunks.
        host: returns the memory of the host whose copies are timed; None to time none.
    """

    fact = "is_measured"

    def __init__(
        self,
        start: Callable[[], Profiling],
        use: Callable[[Measured, Step], None],
        splits: Sequence[SplitBackward],
        host: Callable[[], HostMemory] | None = None,
    ) -> None:
        self._start, self._use, self._splits, self._host = start, use, splits, host
        self.profiling: Profiling | None = None

    def before_step(self, step: Step) -> None:
        if step.forward_only:
            return
        if self.profiling is None:
            self.profiling = self._start()
        self.profiling.before_step(step.num_microbatches)

    def observers(self, step: Step) -> Sequence[Observer]:
        return () if self.profiling is None else self.profiling.observers

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        profiling, usual = self.profiling, step.memory
        if profiling is None or step.forward_only or step.is_rehearsal:
            yield
            return
        parameters = (p for chunk in step.model for p in chunk.parameters())
        step.profiles_pairs = profiling.is_for_pairs
        marks = partial(self._marking, step)
        try:
            with profiling.step(usual, parameters, on_gpu(), marks) as counter:
                step.memory = counter
                yield
        finally:
            step.memory = usual

    @contextmanager
    def _marking(self, step: Step, mark: Mark) -> Iterator[None]:
        usual = step.forward_step_func
        step.forward_step_func = reading(mark, usual)
        try:
            with marking(mark, step.model, [split.queue for split in self._splits]):
                yield
        finally:
            step.forward_step_func = usual

    def after_step(self, step: Step) -> None:
        """Record the end of the step, and hand over a profile that it has completed."""
        profiling = self.profiling
        if profiling is None or step.forward_only:
            return
        profiling.end_step()
        if not profiling.is_complete:
            return
        channels, placement = step.channels, step.physical.placement
        assert channels is not None, "a step has run"
        more = step.program.schedule.rules.more_links(placement)
        links = link_times(channels, placement, step.logical, lambda: step.empty().zero_(), more)
        ahead = clock_ahead(channels, placement, step.logical, device())
        host = None if self._host is None else self._host()
        copies = None if host is None else copy_times(host.engines, host.device)
        self._use(profiling.measured(links, step.empty().nbytes, ahead, copies), step)


@contextmanager
def marking(mark: Mark, chunks: Sequence[Any], queues: Sequence[WeightGradQueue]) -> Iterator[None]:
    """Set marks while this context is active, by hooks on modules and on the tensors between them.

    The hooks of tensors run when the backward reaches them; nothing waits for a device.

    Args:
        mark: receives the name of the part that begins.
        chunks: the model chunks.
        queues: the queue of weight gradients of each chunk.
    """
    with ExitStack() as stack:
        for chunk, queue in zip(chunks, queues, strict=True):
            model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
            for handle in _hooks(mark, model):
                stack.callback(handle.remove)
            queue.on_task = _of_tasks(mark, model)
            stack.callback(setattr, queue, "on_task", None)
        yield


def reading(mark: Mark, forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that reads a batch and runs the model, to set a mark at its start."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        mark(DATA)
        return forward_step(*args, **kwargs)

    return marked


def _hooks(mark: Mark, model: Any) -> Iterator[Any]:
    staged = language_model(model)
    decoder = getattr(staged, "decoder", None)
    if decoder is None:
        return
    yield model.register_forward_pre_hook(lambda *_: mark(BEFORE))

    def begins(module: Any, args: Any, kwargs: Any) -> None:
        mark(LAYERS)
        _when_its_gradient_comes(_input_of(module, args, kwargs), mark, AFTER)

    yield decoder.register_forward_pre_hook(begins, with_kwargs=True)

    def ends(output: Any) -> None:
        mark(AFTER)
        _when_its_gradient_comes(output, mark, LAYERS)

    norm = getattr(decoder, "final_layernorm", None)
    if norm is not None:
        yield norm.register_forward_pre_hook(lambda module, args: ends(args[0]))
    else:
        yield decoder.register_forward_hook(lambda module, args, output: ends(output))
    yield from _hooks_of_prediction(mark, getattr(staged, "mtp", None))


def _hooks_of_prediction(mark: Mark, module: Any) -> Iterator[Any]:
    if module is None:
        return

    def begins(module: Any, args: Any, kwargs: Any) -> None:
        mark(MULTI_TOKEN)
        _when_its_gradient_comes(_input_of(module, args, kwargs), mark, BEFORE)

    def ends(module: Any, args: Any, output: Any) -> None:
        mark(AFTER)
        _when_its_gradient_comes(output, mark, MULTI_TOKEN)

    yield module.register_forward_pre_hook(begins, with_kwargs=True)
    yield module.register_forward_hook(ends)


def _input_of(module: Any, args: Any, kwargs: Any) -> Any:
    """Return the input of a block: its argument, or else its ``input_tensor``, set beforehand."""
    given = kwargs.get("hidden_states", args[0] if args else None)
    return getattr(module, "input_tensor", None) if given is None else given


def _when_its_gradient_comes(tensor: Any, mark: Mark, name: str) -> None:
    if isinstance(tensor, list | tuple):
        tensor = tensor[0]
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
        tensor.register_hook(lambda gradient: mark(name))


def _of_tasks(mark: Mark, model: Any) -> Callable[[tuple[torch.Tensor, ...]], None]:
    names: dict[int, str] = {}
    rest = OUTPUT if model.post_process else ENCODER
    for name, path in ((MULTI_TOKEN, "mtp"), (LAYERS, "decoder")):
        module = getattr(language_model(model), path, None)
        if module is not None:
            names |= {id(weight): name for weight in module.parameters()}

    def before(weights: tuple[torch.Tensor, ...]) -> None:
        mark(names.get(id(weights[0]), rest) if weights else AFTER)

    return before
