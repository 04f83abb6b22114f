"""Profiled steps of a job: marks between the parts of a pass, a file, and a measured schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.measured.parts import (
    AFTER,
    ATTENTION,
    BEFORE,
    DATA,
    ENCODER,
    LAYERS,
    MULTI_TOKEN,
    OUTPUT,
    of_kind,
)
from megatron_zb.measured.profile import Profile, ProfiledModel, write_profile
from megatron_zb.measured.trace import of_spans, write_trace
from megatron_zb.megatron_core.current_schedule import CurrentSchedule
from megatron_zb.megatron_core.model_ends import language_model
from megatron_zb.megatron_core.profiling import HeldStage, Profiling, Spans, iterations_of
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.step import (
    Step,
    StepPart,
    device,
    on_gpu,
    say_on_first_rank,
)
from megatron_zb.megatron_core.versions import HYBRID_PATTERNS
from megatron_zb.runtime.activation_memory import HostMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue
from megatron_zb.runtime.link_times import clock_ahead, copy_times, link_times
from megatron_zb.runtime.observer import Observer
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.layout import Letters, pattern_kinds
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.place_w import fuse_for_free, split_all
from megatron_zb.schedules.step_plan import Lengths

_WORTH_A_CHANGE = 0.001
"""The least share of a step that another order of passes has to save, as predicted."""

Mark = Callable[[str], None]


@dataclass(frozen=True)
class ProfileUse:
    """Purpose of a profile.

    Args:
        path: the file for ``megatron-zb plan --profile``; None for none.
        every: iterations from one profile to the next; None for a single one.
        replans: the schedule is built anew for the measured costs.
    """

    path: Path | None
    every: int | None
    replans: bool

    @property
    def flag(self) -> str | None:
        """The argument that asks for a profile; None for one that ``auto`` makes unasked."""
        if self.path is not None:
            return f"--pipeline-profile {self.path}"
        return None if self.every is None else f"--pipeline-replan-every {self.every}"

    @classmethod
    def of(
        cls, current: CurrentSchedule, path: Path | None, every: int | None, *, is_named: bool
    ) -> ProfileUse | None:
        """Return the use of a profile of a schedule, None if it has none.

        Raises:
            UsageError: ``every`` is less than a profile takes, or there is nothing to distinguish.
        """
        schedule = current.schedule
        iterations = iterations_of(schedule)
        if every is not None and every <= iterations:
            raise UsageError(
                f"--pipeline-replan-every is {every}: a profile takes {iterations} iterations, so "
                f"give {iterations + 1} or more"
            )
        if every is not None and not is_named:
            raise UsageError(
                "--pipeline-replan-every cannot be combined with --pipeline-schedule-file: a "
                "finished schedule is not built anew"
            )
        replans = is_named and (schedule.name == "auto" or every is not None)
        if path is None and not replans:
            return None
        if not current.splits_backward:
            if path is None and every is None:
                return None
            raise UsageError(
                f"{'--pipeline-profile' if path else '--pipeline-replan-every'} needs a schedule "
                f"that splits the backward, such as zb-h1 or v-half: {schedule.name} does not"
            )
        return cls(path, every, replans)


class ProfilePart(StepPart):
    """Measures the passes and links of the first steps of training, and uses what was measured.

    Args:
        letters: the layers of every stage.
        splits: those of the rank's chunks.
        host: returns the memory of the host whose copies are timed; None to time none.
    """

    fact = "is_measured"

    def __init__(
        self,
        current: CurrentSchedule,
        letters: Letters,
        splits: Sequence[SplitBackward],
        use: ProfileUse,
        host: Callable[[], HostMemory] | None = None,
    ) -> None:
        self._current, self._letters, self._splits = current, letters, splits
        self._use, self._host = use, host
        self.profiling: Profiling | None = None
        self.iterations_left: Callable[[], int | None] = lambda: None
        """Returns the iterations of the run from the current one on; None if that is unknown."""
        self._is_awaited = use.flag is not None

    def before_step(self, step: Step) -> None:
        if step.forward_only:
            return
        if self.profiling is None:
            kinds = _kinds_of(self._letters, _pattern_of(step))
            held = [
                HeldStage(stage, step.logical, self._letters[stage], kinds[stage])
                for stage in step.physical.placement.stages_of[step.logical]
            ]
            self.profiling = Profiling(self._current, held, self._use.every)
            self.profiling.before_step(step.num_microbatches)
            self._say_if_too_short(self.profiling)
            return
        self.profiling.before_step(step.num_microbatches)

    def _say_if_too_short(self, profiling: Profiling) -> None:
        needed, left = iterations_of(profiling.usual), self.iterations_left()
        if self._is_awaited and left is not None and left < needed:
            self._is_awaited = False
            say_on_first_rank(
                f"{self._use.flag} needs {needed} iterations, and this run has {left}: nothing is "
                f"measured; train for {needed - left} more, or leave it out"
            )

    def what_is_missing(self) -> str | None:
        """Return a line about a profile that was requested and not completed, once."""
        if not self._is_awaited:
            return None
        self._is_awaited = False
        usual = self._current.schedule if self.profiling is None else self.profiling.usual
        done = 0 if self.profiling is None else self.profiling.done
        needed = iterations_of(usual)
        return (
            f"{self._use.flag} has measured nothing: it needs {needed} iterations of "
            f"{usual.num_microbatches} microbatches, {needed - done} more than this run had"
        )

    def close(self) -> None:
        if (line := self.what_is_missing()) is not None:
            say_on_first_rank(line)

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
        """Record the end of the step; write a profile that it has completed, and use it."""
        profiling = self.profiling
        if profiling is None or step.forward_only:
            return
        profiling.end_step()
        if not profiling.is_complete:
            return
        channels, placement = step.channels, step.physical.placement
        assert channels is not None, "a step has run"
        more = step.program.schedule.rules.more_peers(placement)
        links = link_times(channels, placement, step.logical, lambda: step.empty().zero_(), more)
        ahead = clock_ahead(channels, placement, step.logical, device())
        host = None if self._host is None else self._host()
        copies = None if host is None else copy_times(host.engines, host.device)
        layers = "".join(self._letters).count("t")
        message, model = step.empty().nbytes, _described(step, layers)
        lengths = self._lengths_of(step)
        self._is_awaited = False
        profile, spans = profiling.measured(model, lengths, links, message, ahead, copies)
        self._current.use(profiling.usual)
        self._current.attention = profile.attention_work or self._current.attention
        if self._use.path is not None and dist.get_rank() == 0:
            print(f"megatron_zb: {_written(profile, spans, self._use.path)}", flush=True)
        if self._use.replans:
            say_on_first_rank(self._choose(profile, profiling.usual))

    @staticmethod
    def _lengths_of(step: Step) -> Lengths:
        """Return the lengths of the last step, which stand for those of all that were measured."""
        if step.lengths is not None:
            return step.lengths
        sequence, batch = step.seq_length, step.micro_batch_size
        return Lengths.of([float(sequence * batch)], [float(sequence**2 * batch)])

    def _choose(self, profile: Profile, usual: Schedule) -> str:
        """Rebuild the schedule on one rank for all: it takes all cores and must be equal.

        Returns:
            A line about the schedule that runs from now on.
        """
        current, costs = self._current, self._costs(profile, usual)
        # a pair with a BW may be better than one with a B and a W behind it
        orders = (fuse_for_free(split_all(usual), costs), usual)
        now, usual = min(((current.seconds(o, costs), o) for o in orders), key=itemgetter(0))
        built: list[Schedule | str | None] = [None]
        if dist.get_rank() == 0:
            try:
                built[0] = current.rebuilt(costs)
            except UsageError as error:
                built[0] = str(error)
        dist.broadcast_object_list(built, src=0)
        found = built[0]
        if not isinstance(found, Schedule):
            current.use(usual, costs)
            return f"going on with the schedule as it is: {found}"
        then, part = current.seconds(found, costs), "for the pipeline's part of an iteration"
        is_kept = current.keeps_limit(usual, costs)
        if is_kept and then > now * (1 - _WORTH_A_CHANGE):
            current.use(usual, costs)
            return f"measured: going on with {usual.name} as it is, {now:.4g} s predicted {part}"
        current.use(found, costs)
        line = (
            f"measured: going on with {found.name} built for these costs, {then:.4g} s predicted "
            f"{part}"
        )
        if not is_kept:
            return f"{line}, since the order before, of {now:.4g} s, would exceed the memory limit"
        less = f"{100 * (1 - then / now):.1f} % less"
        reason = f"; {found.reason}" if found.reason else ""
        return f"{line} instead of {now:.4g} s ({less}){reason}"

    def _costs(self, profile: Profile, usual: Schedule) -> Costs:
        """Return the measured costs, with the choices that the flags leave to the schedule."""
        assumed, costs = self._current.costs, profile.costs(usual.placement)
        if assumed.feature(Recomputation):
            costs = profile.with_recomputation(costs)
        if assumed.feature(Offload):
            costs = profile.with_offload(costs, self._current.host_limit(costs))
        return costs


def iterations_left(done: int, of: int | None, exit_interval: int | None) -> int | None:
    """Return the iterations of a run after those that are done; None if that is unknown.

    Args:
        done: iterations since the start of training.
        of: iterations of the training, if they are known.
        exit_interval: the run ends at a multiple of it.
    """
    left = [] if of is None else [of - done]
    left += [exit_interval - done % exit_interval] if exit_interval else []
    return min(left, default=None)


def _described(step: Step, layers: int) -> ProfiledModel:
    config = step.config
    return ProfiledModel(
        layers=layers,
        hidden_size=config.hidden_size,
        sequence_length=step.seq_length,
        microbatch=step.micro_batch_size,
        tensor=step.pg_collection.tp.size(),
        context=step.pg_collection.cp.size(),
        # rows of the whole output layer, which every chunk of Megatron's model has as a number
        vocabulary=getattr(_model_of(step.model[0]), "vocab_size", None),
        pattern=_pattern_of(step),
    )


def _model_of(chunk: Any) -> Any:
    return language_model(get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True))


def _pattern_of(step: Step) -> str | None:
    """Return the letters of a hybrid model's layers without ``|``; None for other models."""
    model = _model_of(step.model[0])
    given = next(filter(None, (getattr(model, name, None) for name in HYBRID_PATTERNS)), None)
    return None if given is None else str(given).replace("|", "")


def _kinds_of(letters: Letters, pattern: str | None) -> list[str]:
    """Return the kinds of each stage's decoder layers; none if the model is no hybrid."""
    kinds = iter(pattern_kinds(pattern or ""))
    return ["".join(islice(kinds, stage.count("t"))) for stage in letters]


def _written(profile: Profile, spans: list[Spans], path: Path) -> str:
    """Write profile and trace; return a line about it, an error as well, which ends no job."""
    try:
        write_profile(profile, path)
        write_trace(of_spans(spans), path)
    except UsageError as error:
        return str(error)
    return f"the profile is in {path}"


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

    has_run = False

    def begins(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal has_run
        has_run = True
        mark(LAYERS)
        _when_its_gradient_comes(_input_of(module, args, kwargs), mark, AFTER)

    yield decoder.register_forward_pre_hook(begins, with_kwargs=True)
    layers = _layers_of(decoder)
    last = layers[-1][0] if layers else ""

    def ends(output: Any) -> None:
        mark(AFTER)
        _when_its_gradient_comes(output, mark, of_kind(LAYERS, last))

    norms = (getattr(decoder, name, None) for name in ("final_layernorm", "final_norm"))
    norm = next(filter(None, norms), None)  # a HybridModel has the latter
    if norm is not None:
        yield norm.register_forward_pre_hook(lambda module, args: ends(args[0]))
    else:
        yield decoder.register_forward_hook(lambda module, args, output: ends(output))
    yield from _hooks_between_kinds(mark, layers)
    for kind, part in layers or [("", decoder)]:
        for module in part.modules():
            if hasattr(module, "core_attention"):
                yield from _hooks_of_attention(mark, module.core_attention, kind, lambda: has_run)
    yield from _hooks_of_prediction(mark, getattr(staged, "mtp", None))


def _layers_of(decoder: Any) -> list[tuple[str, Any]]:
    """Return the layers of a hybrid model's stage, each with the letter of its kind."""
    kinds = getattr(decoder, "layer_type_list", ())
    return list(zip(kinds, decoder.layers, strict=True)) if kinds else []


def _hooks_between_kinds(mark: Mark, layers: Sequence[tuple[str, Any]]) -> Iterator[Any]:
    """Yield hooks that mark the kind of each layer: in F where it begins, in B where the next ends.

    Where Megatron recomputes a layer in B, this is marked as well. The end of the first layer in B
    is that of all layers.
    """

    def begins(kind: str, before: str | None, module: Any, args: Any, kwargs: Any) -> None:
        mark(of_kind(LAYERS, kind))
        if before is not None:
            _when_its_gradient_comes(_input_of(module, args, kwargs), mark, of_kind(LAYERS, before))

    before = None
    for kind, layer in layers:
        yield layer.register_forward_pre_hook(partial(begins, kind, before), with_kwargs=True)
        before = kind


def _hooks_of_attention(
    mark: Mark, module: Any, kind: str, is_split_off: Callable[[], bool]
) -> Iterator[Any]:
    """Yield hooks that mark core attention, and in B from its output's gradient to its query's.

    Overlapped passes run a layer in pieces without its decoder, so that its layers cannot be timed
    separately.

    Args:
        mark: receives the name of the part that begins.
        module: core attention.
        kind: the letter of its layer in a hybrid model.
        is_split_off: returns whether the decoder has run.
    """
    within, around = of_kind(ATTENTION, kind), of_kind(LAYERS, kind)

    def begins(module: Any, args: Any, kwargs: Any) -> None:
        if is_split_off():
            mark(within)
            _when_its_gradient_comes(kwargs.get("query", args[0] if args else None), mark, around)

    def ends(module: Any, args: Any, output: Any) -> None:
        if is_split_off():
            mark(around)
            _when_its_gradient_comes(output, mark, within)

    yield module.register_forward_pre_hook(begins, with_kwargs=True)
    yield module.register_forward_hook(ends)


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
    for kind, layer in _layers_of(getattr(language_model(model), "decoder", None)):
        names |= {id(weight): of_kind(LAYERS, kind) for weight in layer.parameters()}

    def before(weights: tuple[torch.Tensor, ...]) -> None:
        mark(names.get(id(weights[0]), rest) if weights else AFTER)

    return before
