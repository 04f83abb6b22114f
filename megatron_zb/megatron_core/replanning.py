"""Use of a job's own measurements: a profile file, and a schedule for the measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from megatron_zb.errors import UsageError
from megatron_zb.measured.profile import Profile, ProfiledModel, write_profile
from megatron_zb.measured.trace import Trace, of_spans, write_trace
from megatron_zb.megatron_core.model_ends import language_model
from megatron_zb.megatron_core.placement import PhysicalPlacement
from megatron_zb.megatron_core.profiling import HeldStage, Measured, Profiling
from megatron_zb.megatron_core.step import Step
from megatron_zb.schedules.costs import Costs
from megatron_zb.schedules.schedule import Schedule
from megatron_zb.schedules.search.fusing import fuse_for_free, join_all, split_all

# A schedule that is predicted to save less than this share is not worth another order of passes.
_WORTH_A_CHANGE = 0.001


class Replannable(Protocol):
    """A job whose schedule can be exchanged for another one on the same placement."""

    schedule: Schedule
    physical: PhysicalPlacement
    costs: Costs
    unsplit_shares: Sequence[float]

    def layers_of(self, stage: int) -> str:
        """Return the layers of a stage as letters, such as ``Ett``."""

    def use(self, schedule: Schedule, costs: Costs | None = None) -> None:
        """Switch to another order of passes on the same placement from the next step on."""

    def rebuilt(self, costs: Costs) -> Schedule:
        """Build the same kind of schedule on the same placement for other costs, on this rank."""

    def keeps_limit(self, schedule: Schedule, costs: Costs) -> bool:
        """Return whether an order keeps the memory limit, for costs in bytes."""

    def host_limit(self, costs: Costs) -> float:
        """Return the most bytes of the host that a rank may take, for costs in bytes."""

    def seconds(self, schedule: Schedule, costs: Costs) -> float:
        """Predict the seconds of an iteration."""


class Replanning:
    """Profiling of a job and its use; see ``PipelineAdapter.profile``."""

    def __init__(
        self,
        adapter: Replannable,
        *,
        path: Path | None,
        replan: bool,
        say: Callable[[str], None],
    ) -> None:
        self._adapter, self._path, self._replan, self._say = adapter, path, replan, say
        self._usual = adapter.schedule

    def start(self, every: int | None) -> Profiling:
        """Create the profiling of this rank's stages, once the process groups exist."""
        adapter = self._adapter
        rank = adapter.physical.logical(parallel_state.get_pipeline_model_parallel_rank())
        held = [
            HeldStage(stage, rank, adapter.layers_of(stage))
            for stage in adapter.schedule.placement.stages_of[rank]
        ]
        is_cut = adapter.costs.vocabulary is not None
        return Profiling(
            self._begin,
            self._split,
            self._join,
            self._pair,
            held,
            adapter.schedule.num_microbatches,
            every,
            adapter.schedule.placement.num_stages + rank if is_cut else None,
        )

    def _begin(self) -> bool:
        self._usual = self._adapter.schedule
        return bool(self._usual.pairs)

    def _split(self) -> None:
        """Split every backward, since B and W can only be timed apart where each runs by itself."""
        self._adapter.use(split_all(self._usual.without_pairs()))

    def _join(self) -> None:
        """Make every backward whole again: its time is not the sum of its halves'."""
        self._adapter.use(join_all(self._usual.without_pairs()))

    def _pair(self) -> None:
        """Run the schedule as it is, with its pairs."""
        self._adapter.use(self._usual)

    def use(self, measured: Measured, step: Step) -> None:
        """Write the measurements and choose a schedule, on every rank between two iterations."""
        profile = self._profile(measured, step)
        self._adapter.use(self._usual)
        if self._path is not None and dist.get_rank() == 0:
            self._write(profile, of_spans(measured.spans), self._path)
        if self._replan:
            self._choose(profile)

    def _write(self, profile: Profile, trace: Trace, path: Path) -> None:
        """Write profile and trace; report a file that cannot be written without ending the job."""
        try:
            write_profile(profile, path)
            write_trace(trace, path)
        except UsageError as error:
            self._say(str(error))
        else:
            self._say(f"the profile is in {path}")

    def _profile(self, measured: Measured, step: Step) -> Profile:
        config, schedule = step.config, self._usual
        return Profile(
            version=5,
            device=torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
            schedule=schedule.name,
            pipeline_size=schedule.placement.pipeline_size,
            num_microbatches=schedule.num_microbatches,
            message=measured.message,
            model=ProfiledModel(
                layers=sum(stage.layers.count("t") for stage in measured.stages),
                hidden_size=config.hidden_size,
                sequence_length=step.seq_length,
                microbatch=step.micro_batch_size,
                tensor=step.pg_collection.tp.size(),
                context=step.pg_collection.cp.size(),
                vocabulary=_rows_of_output(step.model[0]),
            ),
            stages=[
                stage.model_copy(update={"unsplit": share})
                for stage, share in zip(measured.stages, self._unsplit_shares(), strict=True)
            ],
            pairs=measured.pairs,
            links=measured.links,
            parts=measured.parts,
            host=measured.host,
            outside=measured.outside,
            vocabulary=measured.vocabulary,
            host_link=measured.host_link,
        )

    def _unsplit_shares(self) -> Sequence[float]:
        known = self._adapter.unsplit_shares
        return known or [0.0] * self._usual.placement.num_stages

    def _choose(self, profile: Profile) -> None:
        """Rebuild the schedule on one rank for all: it takes all cores and must be equal."""
        adapter = self._adapter
        costs = self._costs(profile)
        # a pair with a BW may be better than one with a B and a W behind it
        orders = (fuse_for_free(split_all(self._usual), costs), self._usual)
        now, usual = min(((adapter.seconds(o, costs), o) for o in orders), key=itemgetter(0))
        built: list[Any] = [None]
        if dist.get_rank() == 0:
            built[0] = self._built(profile)
        dist.broadcast_object_list(built, src=0)
        found = built[0]
        if not isinstance(found, Schedule):
            adapter.use(usual, costs)
            self._say(f"going on with the schedule as it is: {found}")
            return
        then = adapter.seconds(found, costs)
        if not adapter.keeps_limit(usual, costs):
            adapter.use(found, costs)
            self._say(
                f"measured: going on with {found.name} built for these costs, {then:.4g} s "
                "predicted for the pipeline's part of an iteration, since the order before, of "
                f"{now:.4g} s, would exceed the memory limit"
            )
            return
        if then > now * (1 - _WORTH_A_CHANGE):
            adapter.use(usual, costs)
            self._say(
                f"measured: going on with {usual.name} as it is, {now:.4g} s predicted for the "
                "pipeline's part of an iteration"
            )
            return
        adapter.use(found, costs)
        self._say(
            f"measured: going on with {found.name} built for these costs, {then:.4g} s predicted "
            f"for the pipeline's part of an iteration instead of {now:.4g} s "
            f"({100 * (1 - then / now):.1f} % less){'; ' if found.reason else ''}{found.reason}"
        )

    def _built(self, profile: Profile) -> Schedule | str:
        try:
            return self._adapter.rebuilt(self._costs(profile))
        except UsageError as error:
            return str(error)

    def _costs(self, profile: Profile) -> Costs:
        """Return the measured costs, with the choices that the flags leave to the schedule."""
        assumed, costs = self._adapter.costs, profile.costs(self._usual.placement)
        if assumed.recompute:
            costs = profile.with_recomputation(costs)
        if assumed.copy:
            costs = profile.with_offload(costs, self._adapter.host_limit(costs))
        return costs


def _rows_of_output(chunk: Any) -> int | None:
    """Return the rows of the whole output layer, which every chunk of Megatron's model knows."""
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return getattr(language_model(model), "vocab_size", None)
