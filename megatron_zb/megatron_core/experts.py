"""Experts under a schedule: metrics, paged stash, and an all-to-all that hides in pairs.

Megatron sums a metric of experts, such as an auxiliary loss, over the pipeline, and then over the
group that its routers have named. A rank without routers has no entry, or one without a group.
Where it is the rank that logs, it logs the part of its tensor rank only; where it is not, the
others wait for it. Whether the rank that logs has experts depends on the placement.

Forward and backward of two microbatches run in one pass, so that the all-to-all hides. Megatron can
build a plan of a chunk's forward: its layers cut into attention, dispatch, experts and combine.
Running two plans together, one forward and one backward, puts computation on one stream and
communication between experts on another, layer by layer. Megatron's own interleaved schedule does
so with ``--overlap-moe-expert-parallel-comm``; here the pairs of a schedule do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import Fp8Recipe
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.pipeline_parallel import schedules as megatron_schedules
from megatron.core.utils import get_attr_wrapped_model
from torch.autograd.graph import GradientEdge

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.stages import MegatronStage
from megatron_zb.megatron_core.step import Step, StepPart, device
from megatron_zb.megatron_core.versions import Graphs
from megatron_zb.runtime.executor import Side, one_after_the_other
from megatron_zb.schedules.schedule import Schedule

# --- metrics and paged stash


class ExpertMetricsPart(StepPart):
    """Shares the metrics of experts after the first step: no later step counts others."""

    def __init__(self) -> None:
        self._is_due = True

    def after_step(self, step: Step) -> None:
        if step.forward_only or step.captured:
            return
        if self._is_due and getattr(step.config, "num_moe_experts", None):
            share(step.pg_collection.pp, device())
        self._is_due = False


class PagedStashPart(StepPart):
    """Starts the steps of the paged stash, which keeps to the order that it has recorded once."""

    def __init__(self) -> None:
        self._recorded: Schedule | None = None

    def before_step(self, step: Step) -> None:
        if not getattr(step.config, "moe_paged_stash", False):
            return
        if not step.forward_only and step.program.schedule != self._recorded:
            versions.forget_order_of_paged_stash()
            self._recorded = step.program.schedule
        versions.start_paged_stash(step.config, forward_only=step.forward_only)


class _Metric(NamedTuple):
    """A metric as it is sent to other ranks: its size, and its fields with groups by name."""

    size: int
    fields: dict[str, Any]
    groups: dict[str, str | None]


def share(pipeline: dist.ProcessGroup, device: torch.device | str | int) -> None:
    """Give every rank of the pipeline an entry for each metric that one of them has counted.

    Collective over the pipeline; to be called after a training step and before its log.
    """
    known = _groups()
    own = {name: _described(entry, known) for name, entry in versions.expert_metrics().items()}
    everyone: list[dict[str, _Metric]] = [{}] * pipeline.size()
    dist.all_gather_object(everyone, own, group=pipeline)
    for name, metric in _of_routers(everyone).items():
        if name in own and any(own[name].groups.values()):
            continue
        fields = metric.fields | {f: g and known[g] for f, g in metric.groups.items()}
        if name not in own:
            fields["values"] = torch.zeros(metric.size, device=device)
        versions.set_expert_metric(name, fields)


def _groups() -> dict[str, dist.ProcessGroup]:
    return {
        "tp_cp": parallel_state.get_tensor_and_context_parallel_group(),
        "tp_dp_cp": parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
    }


def _described(entry: dict[str, Any], known: dict[str, dist.ProcessGroup]) -> _Metric:
    fields = {n: v for n, v in entry.items() if n != "values" and not n.endswith("_group")}
    groups = {n: _name_of(v, known) for n, v in entry.items() if n.endswith("_group")}
    return _Metric(entry["values"].numel(), fields, groups)


def _name_of(group: Any, known: dict[str, dist.ProcessGroup]) -> str | None:
    if group is None:
        return None
    ranks = dist.get_process_group_ranks(group)
    return next((n for n, g in known.items() if dist.get_process_group_ranks(g) == ranks), None)


def _of_routers(everyone: list[dict[str, _Metric]]) -> dict[str, _Metric]:
    """Return the metrics of all ranks, each as a rank has it whose routers have named a group."""
    found: dict[str, _Metric] = {}
    for of_rank in everyone:
        for name, metric in of_rank.items():
            if name not in found or not any(found[name].groups.values()):
                found[name] = metric
    return found


# --- pairs


FLAG = "--overlap-moe-expert-parallel-comm"


class Ran(NamedTuple):
    """A plan whose forward has run.

    ``output`` is what it has made; on the last stage ``loss`` is where the loss computed from it
    stands in the graph of autograd.
    """

    plan: Any
    output: torch.Tensor
    loss: GradientEdge | None = None


class PairedStage(MegatronStage):
    """A chunk whose passes run through Megatron's plans, each alone or a forward and a backward.

    A backward can only run through the plan of its forward, so single passes also run through one.
    A forward that keeps nothing for its backward has a plan only in a pair.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        _check_builds_plans(self._step.forward_step_func)
        versions.set_streams(self._step.config)
        self._ran: Ran | None = None
        self._with_forward: Callable[[Any], torch.Tensor] = self._forward_alone
        self._with_backward: Callable[[Any, Any], None] = self._backward_alone

    # --- alone

    def forward(self, microbatch: int, activation: torch.Tensor | None) -> torch.Tensor | None:
        output = super().forward(microbatch, activation)
        ran, self._ran = self._ran, None
        if output is not None and ran is not None:
            # it may come from the stream of the experts; this one sends it
            output.record_stream(torch.cuda.current_stream())
            _free(ran.output)
        return output

    def recompute(self, microbatch: int) -> None:
        super().recompute(microbatch)
        ran, self._ran = self._ran, None
        assert ran is not None, "what is recomputed has run through a plan"
        _free(ran.output)

    def _user_step(self, data_iterator: Any, model: Any) -> Any:
        """Build the plan of a forward, run it, and return what Megatron computes the loss from."""
        keeps_graph = torch.is_grad_enabled() and not self._is_dropping
        if not (keeps_graph or self._is_in_pair):
            return super()._user_step(data_iterator, model)
        planned = get_attr_wrapped_model(model, "build_schedule_plan", return_model_obj=True)
        plan, loss_func = self._call_model(data_iterator, planned, return_schedule_plan=True)
        _keep_input_of_only_experts(plan)
        if self.streams is not None:
            self.streams.seed_plan(plan)
        output = self._with_forward(plan)
        if self._is_last:
            output = output.detach().requires_grad_()
        self._ran = Ran(plan, output)
        return output, loss_func

    def _start_of_backward(self, output: torch.Tensor) -> Ran:
        assert self._ran is not None
        if self._is_last:
            return self._ran._replace(loss=super()._start_of_backward(output))
        return self._ran

    def _run_backward(self, start: Ran, gradient: torch.Tensor | None) -> None:
        if start.loss is not None:
            super()._run_backward(start.loss, gradient)
            gradient = start.output.grad
        self._with_backward(start.plan, gradient)

    @property
    def _is_in_pair(self) -> bool:
        return self._with_forward != self._forward_alone

    def _forward_alone(self, plan: Any) -> torch.Tensor:
        return self.run_plans(plan, None, None)

    def _backward_alone(self, plan: Any, gradient: torch.Tensor) -> None:
        self.run_plans(None, plan, gradient)

    def run_plans(self, forward: Any, backward: Any, gradient: torch.Tensor | None) -> torch.Tensor:
        """Run the plan of a forward, of a backward, or both, and return the forward's output."""
        with _quantizing(self._step.config):
            output: torch.Tensor = type(forward or backward).run(forward, backward, b_grad=gradient)
        return output

    # --- together

    @contextmanager
    def carrying_out(
        self,
        *,
        forward: Callable[[Any], torch.Tensor] | None = None,
        backward: Callable[[Any, Any], None] | None = None,
    ) -> Iterator[None]:
        """Run the plans of a forward or a backward inside by other functions."""
        usual = self._with_forward, self._with_backward
        self._with_forward = forward or self._with_forward
        self._with_backward = backward or self._with_backward
        try:
            yield
        finally:
            self._with_forward, self._with_backward = usual


def run_pair(forward: Side, backward: Side) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Run a forward and a backward through one run of their plans; see ``executor.PairHandler``.

    The backward runs within the forward, where the plan of the latter would run alone, so each has
    around it all that it has alone: streams, timers, the queue of a B, the reductions of a BW.
    """
    f, b = forward.stage, backward.stage
    if not (isinstance(f, PairedStage) and isinstance(b, PairedStage)):
        return one_after_the_other(forward, backward)
    gradient: torch.Tensor | None = None

    def with_backward(f_plan: Any) -> torch.Tensor:
        nonlocal gradient
        outputs = []

        def both(b_plan: Any, received: torch.Tensor | None) -> None:
            f._choose_streams(forward.microbatch)
            outputs.append(b.run_plans(f_plan, b_plan, received))

        with b.carrying_out(backward=both):
            gradient = backward.run()
        return outputs.pop()

    with f.carrying_out(forward=with_backward):
        activation = forward.run()
    return activation, gradient


def _free(output: torch.Tensor) -> None:
    """Free the data of an output whose graph is kept."""
    megatron_schedules.deallocate_output_tensor(output, deallocate_pipeline_outputs=True)


def _quantizing(config: Any) -> Any:
    """Return the context of fp8 whose scales follow from earlier steps; other recipes' are inside.

    Megatron enters those for each layer of a plan itself.
    """
    delayed = config.fp8 and config.fp8_recipe == Fp8Recipe.delayed
    return get_fp8_context(config) if delayed else nullcontext()


def _check_builds_plans(forward_step: Callable[..., Any]) -> None:
    """Raise a UsageError where the script's forward step does not return plans."""
    taken = inspect.signature(forward_step).parameters.values()
    if not any(p.name == "return_schedule_plan" or p.kind is p.VAR_KEYWORD for p in taken):
        raise UsageError(
            f"{FLAG} needs a forward step that takes return_schedule_plan, as that of "
            "pretrain_gpt.py does: leave the flag out for this script"
        )


def _keep_input_of_only_experts(plan: Any) -> None:
    """Keep the tokens of experts that are alone on their rank until the backward.

    Up to 0.18, Megatron frees what an all-to-all has brought, as if it were sorted by expert then.
    """
    for number in range(plan.num_layers()):
        part = plan.get_layer(number)
        if part.config.moe_token_dispatcher_type == "alltoall" and any(
            getattr(module, "num_local_experts", None) == 1 for module in part.layer.modules()
        ):
            part.mlp.free_input = False


class OverlapPart(StepPart):
    """Runs the pairs of a schedule through Megatron's plans, if Megatron overlaps experts."""

    pair_handler = staticmethod(run_pair)

    def stage_type(self, number: int, step: Step) -> Callable[..., Any] | None:
        return PairedStage if runs_plans(step) else None


def runs_plans(step: Step) -> bool:
    """Return whether the forwards of a step run through Megatron's plans."""
    if not getattr(step.config, "overlap_moe_expert_parallel_comm", False):
        return False
    # graphs hold parts of a layer, and only plans run the others
    has_parts = versions.graphs_of(step.config) is Graphs.TRANSFORMER_ENGINE
    has_parts = has_parts and not step.forward_only
    return has_parts or step.profiles_pairs or bool(step.program.schedule.pairs)
