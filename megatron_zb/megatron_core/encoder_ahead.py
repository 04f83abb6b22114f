"""Training of a model whose frozen encoder runs one step ahead, on every rank.

The weights of a frozen encoder never change, so its outputs are the same a step earlier. Every rank
has a copy, and encodes every p-th microbatch of the next step between the passes of this one:

1. F of the encoder reads microbatches of the next step, and keeps its outputs on the rank.
2. Behind the passes of a step, all ranks send their outputs to the rank of the first stage.
3. In the next step, the first stage takes them in place of the encoder.

The first stage itself encodes what is not there: in evaluations, in the first step, and in a step
that follows one which may not read ahead, such as one with a checkpoint behind it.

See :mod:`megatron_zb.schedules.features.second_model` for the order of the passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.data_iterators import ReadAStepAhead
from megatron_zb.megatron_core.encoders import ENCODERS, FROZEN, EncoderOfModel, encoder_of
from megatron_zb.megatron_core.model_calls import inner_model
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.spread_encoder import CHUNK, EncoderPart, EncoderStage
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, device
from megatron_zb.runtime.observer import NOTHING
from megatron_zb.schedules.features.second_model import SecondModelRules

_DIMENSIONS = 4  # that an output of an encoder may have


class AheadStage(EncoderStage):
    """The frozen encoder of a rank in one step, which works for the next one."""

    _part: EncoderAheadPart

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> None:
        """Run F of a microbatch of the next step, if this step may read ahead."""
        if not self._part.reads_ahead:
            return
        with torch.no_grad(), self._next_streams():
            output = self._forward_step(microbatch, activation)
        self._part.made[self._rules.microbatch_of(microbatch)] = output

    @contextmanager
    def _next_streams(self) -> Iterator[None]:
        """Draw from the streams of the next step."""
        if self.streams is None:
            yield
            return
        step = self.streams.step
        self.streams.start_step(None if step is None else step + 1)
        try:
            yield
        finally:
            self.streams.start_step(step)


class EncodedBefore(MegatronStage):
    """The first stage of a model, for some of whose microbatches the encoder has run before."""

    def __init__(self, *arguments: Any, part: EncoderAheadPart, encoder: EncoderOfModel) -> None:
        self._part, self._encoder = part, encoder
        super().__init__(*arguments)

    def _forward_step(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor:
        model = inner_model(self._step.model[self.chunk])
        output = None if self._step.forward_only else self._part.outputs.pop(microbatch, None)
        given = NOTHING if output is None else self._encoder.given(model, output)
        with given:
            return super()._forward_step(microbatch, activation)


class EncoderAheadPart(EncoderPart):
    """Runs a frozen encoder on every rank for the next step.

    Args:
        physical: the stages of the ranks.
        splits: those of the rank's chunks.
    """

    sends_other_shapes = False
    kinds: ClassVar[Mapping[str, EncoderOfModel]] = FROZEN

    def __init__(self, physical: PhysicalPlacement, splits: Sequence[SplitBackward]) -> None:
        super().__init__(physical, splits)
        self._reading: ReadAStepAhead | None = None
        self.may_read_ahead: Callable[[], bool] | None = None
        """Returns whether the step that begins may read the data of the next one."""
        self.reads_ahead = False
        """Whether the step encodes for the next one."""
        self.made: dict[int, torch.Tensor] = {}
        """Outputs of this rank for microbatches of the next step."""
        self.outputs: dict[int, torch.Tensor] = {}
        """Outputs for microbatches of this step, on the rank of the first stage."""

    def prepare_forwards(self, chunks: list[Any]) -> None:
        """Let all but the first stage run their layers alone; that encodes where it has to.

        Only the first stage keeps what runs behind the encoder, such as a projection that trains.
        """
        later = [chunk for chunk in chunks if not inner_model(chunk).pre_process]
        super().prepare_forwards(later)
        for model in map(inner_model, later):
            for name, _ in list(encoder_of(model, ENCODERS).parts(model)):
                if name not in encoder_of(model, self.kinds).modules:
                    setattr(model, name, None)

    def before_step(self, step: Step) -> None:
        """Let the encoder read the next step's microbatches beside the chunk that has it.

        Raises:
            UsageError: nobody says whether a step may read ahead, the encoder has weights that
                train, a CUDA graph captures the step, chunks share an iterator, what was read ahead
                is of another one, or the copies have other weights.
        """
        name = step.program.schedule.name
        if self.may_read_ahead is None:
            raise UsageError(
                f"{name}: the encoder runs for the next step: call encode_ahead first, which tells "
                "whether one follows"
            )
        if step.captured:
            raise UsageError(
                f"{name}: a CUDA graph keeps to one step, but the encoder runs for the next one: "
                "leave one of the two out"
            )
        self.check_copies(step)
        self.reads_ahead = not step.forward_only and self.may_read_ahead()
        if step.forward_only:
            return
        if self.trained(step):
            raise UsageError(
                f"{name}: the encoder has weights that train, so it cannot run before their "
                "update: freeze it, or let it run in its own step"
            )
        self._share(step)

    def _share(self, step: Step) -> None:
        """Let the encoder read from the iterator of its chunk, a step ahead of the chunk."""
        name, (own, *others) = step.program.schedule.name, step.data_iterators
        if own is None:  # as on tensor-parallel ranks that are sent what another one reads
            step.data_iterators = [own, *others, None]
            return
        if any(it is own for it in others):
            raise UsageError(
                f"{name}: all chunks of a rank read from one iterator, of which the encoder would "
                "take what others have not read: give each chunk an iterator of its own"
            )
        if self._reading is None or self._reading.iterators[0] is not own:
            if self._reading is not None and self._reading.is_ahead:
                raise UsageError(
                    f"{name}: a step reads from another iterator than the one before, which has "
                    "read ahead: it may not read ahead before such a change"
                )
            self._reading = ReadAStepAhead(own)
        first, later = self._reading.views(step.num_microbatches, self.microbatches(step))
        step.data_iterators = [first, *others, later]

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        assert self._encoder is not None, "the model has been prepared"
        return partial(EncodedBefore, part=self, encoder=self._encoder) if number == 0 else None

    def more_stages(self, stages: Mapping[int, Any], step: Step) -> Mapping[int, Any]:
        assert self._encoder is not None, "the model has been prepared"
        return {self.stage(step): AheadStage(step, self._splits[CHUNK], self, self._encoder)}

    @contextmanager
    def around(self, step: Step) -> Iterator[None]:
        """Add nothing up: a frozen encoder has no gradients."""
        yield

    def after_step(self, step: Step) -> None:
        """Send the outputs to the first stage, and go on to the next step's data."""
        if step.forward_only:
            return
        if self._reading is not None:
            self._reading.finish(step.num_microbatches)
        self.outputs = self._gathered(step) if self.reads_ahead else {}
        self.made = {}

    def _gathered(self, step: Step) -> dict[int, torch.Tensor]:
        """Return the outputs of all ranks by microbatch on the first stage's rank, else nothing."""
        group, rules, own = step.pg_collection.pp, _rules(step), self.microbatches(step)
        most = -(-len(rules.served) // group.size())
        sizes = torch.zeros(most, _DIMENSIONS, dtype=torch.int64)
        for row, unit in zip(sizes, own, strict=False):
            shape = self.made[unit].shape
            row[: len(shape)] = torch.tensor([n + 1 for n in shape])  # 0 is no dimension
        sizes = sizes.to(device())
        of_ranks = [torch.empty_like(sizes) for _ in range(group.size())]
        dist.all_gather(of_ranks, sizes, group=group)
        if step.pp_rank != self._home:
            sent = [self.made[unit].contiguous() for unit in own]
            source = dist.get_process_group_ranks(group)[self._home]
            _all_done([dist.P2POp(dist.isend, it, source, group) for it in sent if it.numel()])
            return {}
        return self._received(step, [it.tolist() for it in of_ranks])

    def _received(self, step: Step, of_ranks: Sequence[list[list[int]]]) -> dict[int, torch.Tensor]:
        """Receive the outputs of the other ranks.

        Args:
            step: whose passes have run.
            of_ranks: for each rank a row for each output: its sizes, one more each, then zeros.
        """
        rules, placement = _rules(step), step.program.schedule.placement
        ranks = dist.get_process_group_ranks(step.pg_collection.pp)
        found, wanted = dict(self.made), []
        for rank, rows in enumerate(of_ranks):
            if rank == self._home:
                continue
            stage = placement.stages_of[self._physical.logical(rank)][-1]
            units = map(rules.microbatch_of, rules.columns.on(stage))
            for unit, row in zip(units, rows, strict=False):
                shape = [n - 1 for n in row if n]
                output = torch.empty(shape, dtype=step.config.pipeline_dtype, device=device())
                found[unit] = output
                if output.numel():
                    group = step.pg_collection.pp
                    wanted.append(dist.P2POp(dist.irecv, output, ranks[rank], group))
        _all_done(wanted)
        return found


def _rules(step: Step) -> SecondModelRules:
    rules = step.program.schedule.rules
    assert isinstance(rules, SecondModelRules)
    return rules


def _all_done(operations: Sequence[dist.P2POp]) -> None:
    """Start messages together, and wait for all."""
    for work in dist.batch_isend_irecv(list(operations)) if operations else ():
        work.wait()
