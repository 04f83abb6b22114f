"""Updates one step late, against Megatron's own schedule on the weights before the last update."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapters import scheduled
from brief_searches import briefly
from gpt_cases import GPTCase, built, forward_backward, microbatches, skip_without_hybrids
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.utils import get_model_config
from model_options import EXPERTS, options
from ranks import RankPools

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.late_updates import DelayedPart
from megatron_zb.megatron_core.post_validation import bring_to_model
from megatron_zb.megatron_core.random_streams import global_parameters
from megatron_zb.runtime.update_rules import WeightPrediction
from megatron_zb.schedules.layout import Layers
from megatron_zb.schedules.lowering import Program, Send, WaitReceive
from megatron_zb.schedules.passes import Channel, Message

M = 4
FP32 = GPTCase(layers=8)


@dataclass(frozen=True)
class Training:
    """A training.

    ``drained``, ``evaluated`` and ``saved`` are the steps behind which it does this.
    """

    case: GPTCase = FP32
    schedule: str = "v-half"
    optimizer: str = "adam"
    clip: float = 0.0
    steps: int = 6
    drained: tuple[int, ...] = ()
    evaluated: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()
    microbatches: int = M
    feedback: float | None = 0.0
    prediction: str | None = None


@dataclass
class Run:
    """Losses of the steps on this rank, the last learning rate, and the weights at the end.

    ``place`` is that among the data-parallel and the tensor-parallel ranks. ``skipped`` says of
    each step what the optimizer reports in it, ``scales`` are its loss scales. ``arriving`` says
    whether weights are still gathered behind a step.
    """

    place: tuple[int, int] = (0, 0)
    losses: list[list[float]] = field(default_factory=list)
    held_out: list[list[float]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    arriving: list[bool] = field(default_factory=list)
    rate: float = 0.0
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def optimizer_of(training: Training, chunks: list[Any]) -> tuple[Any, Any]:
    """Megatron's, and the scheduler of a learning rate that changes in every step."""
    case = training.case
    config = OptimizerConfig(
        optimizer=training.optimizer,
        lr=0.01,
        min_lr=0.001,
        weight_decay=0.1,
        sgd_momentum=0.9,
        bf16=case.dtype == "bfloat16",
        fp16=case.dtype == "float16",
        initial_loss_scale=2.0**18,  # with which gradients are infinite
        loss_scale_window=2,
        params_dtype=case.torch_dtype,
        use_distributed_optimizer=case.distributed_optimizer,
        clip_grad=training.clip,
    )
    if training.optimizer == "muon":
        from muon_stand_in import muon

        optimizer = muon(chunks, config, layer_wise=False)
    else:
        optimizer = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False)
    if case.dtype == "float16":
        for chunk in chunks:
            get_model_config(chunk).grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=3,
        lr_decay_steps=training.steps,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=training.steps,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def batches(training: Training, first: int, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Other tokens in every step."""
    for step in range(first, first + steps):
        for batch in microbatches(training.case, training.microbatches):
            yield {**batch, "tokens": (batch["tokens"] + step) % 64}


def losses_of(records: list[Any]) -> list[float]:
    return [float(record["lm loss"]) for record in records]


def at_the_end(run: Run, optimizer: Any, chunks: list[Any]) -> Run:
    run.place = (
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    run.rate = float(optimizer.param_groups[0]["lr"])
    for chunk in chunks:
        for name, parameter in global_parameters(chunk).items():
            run.parameters[name.replace("module.", "")] = parameter.detach().clone()
    of_routers = (it for chunk in chunks for it in chunk.modules() if hasattr(it, "expert_bias"))
    for router in of_routers:
        if router.expert_bias is not None:
            run.parameters[f"bias of layer {router.layer_number}"] = router.expert_bias.clone()
    return run


def delayed(training: Training) -> Run:
    """The training with an update delay, in the way of Megatron-LM's loop."""
    case, run, m = training.case, Run(), training.microbatches
    late, step = replace(case, update_delay=1), 0

    def steps_done() -> int:
        return step

    drawn = steps_done if case.dropout else None
    with briefly(), built(late, training.schedule, m, drawn) as (adapter, chunks):
        assert adapter is not None
        optimizer, scheduler = optimizer_of(training, chunks)

        def may_read_ahead() -> bool:
            return step + 1 < training.steps and step not in training.saved

        part = adapter.delay_updates(
            optimizer,
            scheduler,
            chunks,
            may_read_ahead,
            feedback=training.feedback,
            prediction=training.prediction,
        )
        function = adapter.forward_backward_func
        data = [batches(training, 0, training.steps) for _ in chunks]
        for step in range(training.steps):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            run.losses.append(losses_of(forward_backward(function, chunks, data, m)))
            run.arriving.append(part._updates.banks.are_arriving)
            success, norm, _ = optimizer.step()
            if success:
                scheduler.step(increment=1)
            run.skipped.append(not success)
            run.norms.append(norm)
            run.scales.append(float(optimizer.get_loss_scale()))
            if step in training.drained:
                part.drain()
            if step in training.saved:
                part.restart()
            if step in training.evaluated:
                held_out = [batches(training, 100, 1) for _ in chunks]
                records = forward_backward(function, chunks, held_out, m, forward_only=True)
                run.held_out.append(losses_of(records))
        part.drain()
        run.norms.append(part.norm)
        run.scales.append(float(optimizer.get_loss_scale()))
        return at_the_end(run, optimizer, chunks)


def oracle(training: Training) -> Run:
    """Megatron's 1F1B on the weights after one update fewer, whose update changes the newest.

    With dropout it is 1F1B without a delay, whose layers draw from streams of their own.
    """
    case, run, m, step = training.case, Run(), training.microbatches, 0

    def steps_done() -> int:
        return step

    with built(case, "1f1b" if case.dropout else None, m, steps_done) as (adapter, chunks):
        optimizer, scheduler = optimizer_of(training, chunks)
        function = adapter.forward_backward_func if adapter else get_forward_backward_func()
        weights, biases, scales = Weights(chunks), Biases(chunks), Scales(optimizer)
        each = (weights, biases, scales)
        own = [it for one in optimizers_in(optimizer) for it in one.get_parameters()]
        last: list[torch.Tensor] = []
        for step in range(training.steps):
            for state in each:
                state.begin()
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            data = [batches(training, step, 1) for _ in chunks]
            run.losses.append(losses_of(forward_backward(function, chunks, data, m)))
            weights.end()
            was = [it.detach().clone() for it in own]
            success, norm, _ = optimizer.step()
            update = [old - new.detach() for old, new in zip(was, own, strict=True)]
            if success and training.feedback:
                for weight, now, earlier in zip(own, update, last or update, strict=True):
                    weight.data.add_(earlier - now, alpha=training.feedback)
                bring_to_model(optimizers_in(optimizer))
                last = update
            if training.prediction is not None and success:
                weights.predict(optimizer, predicted(training, optimizer, own, update))
            if success:
                scheduler.step(increment=1)
            run.skipped.append(not success)
            run.norms.append(norm)
            run.scales.append(float(optimizer.get_loss_scale()))
            if step in training.evaluated:
                held_out = [batches(training, 100, 1) for _ in chunks]
                records = forward_backward(function, chunks, held_out, m, forward_only=True)
                run.held_out.append(losses_of(records))
            if step in training.saved:  # as a training that begins with these weights
                last = []
                for state in each:
                    state.forget()
        return at_the_end(run, optimizer, chunks)


def optimizers_in(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def predicted(
    training: Training, optimizer: Any, own: list[torch.Tensor], update: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The optimizer's weights after one more update like the last one, or along its momentum."""
    if training.prediction == "linear":
        return [it.detach() - was for it, was in zip(own, update, strict=True)]
    (only,) = optimizers_in(optimizer)
    ahead = WeightPrediction().ahead(own, only.optimizer)
    assert ahead is not None
    return ahead


class Weights:
    """The weights, and those of the step before, with which the step computes."""

    def __init__(self, chunks: list[Any]) -> None:
        self._own = [it for chunk in chunks for it in chunk.parameters()]
        self.forget()

    def forget(self) -> None:
        self._before = self._now()
        self._predicted: list[torch.Tensor] | None = None

    def _now(self) -> list[torch.Tensor]:
        return [it.detach().clone() for it in self._own]

    def _put(self, weights: list[torch.Tensor]) -> None:
        for parameter, weight in zip(self._own, weights, strict=True):
            parameter.data.copy_(weight)

    def begin(self) -> None:
        self._newest = self._now()
        self._put(self._before)
        self._before = self._predicted or self._newest

    def end(self) -> None:
        self._put(self._newest)

    def predict(self, optimizer: Any, ahead: list[torch.Tensor]) -> None:
        """Compute the step after the next one with other weights than the newest ones."""
        own = [it for one in optimizers_in(optimizer) for it in one.get_parameters()]
        newest = [it.detach().clone() for it in own]
        for weights in (ahead, newest):
            for parameter, weight in zip(own, weights, strict=True):
                parameter.data.copy_(weight)
            bring_to_model(optimizers_in(optimizer))
            if weights is ahead:
                self._predicted = self._now()


class Biases:
    """The biases of routers, and those of the step before; an update moves the newest ones."""

    def __init__(self, chunks: list[Any]) -> None:
        for chunk in chunks:
            config = get_model_config(chunk)
            self._finalize = config.finalize_model_grads_func
            config.finalize_model_grads_func = self.end
        modules = [it for chunk in chunks for it in chunk.modules()]
        self._routers = [it for it in modules if getattr(it, "expert_bias", None) is not None]
        for router in self._routers:
            router._maintain_float32_expert_bias()
        self.forget()

    def forget(self) -> None:
        self._before = [it.expert_bias.clone() for it in self._routers]

    def begin(self) -> None:
        self._newest = [it.expert_bias.clone() for it in self._routers]
        self._put(self._before)
        self._before = self._newest

    def _put(self, biases: list[torch.Tensor]) -> None:
        for router, bias in zip(self._routers, biases, strict=True):
            router.expert_bias.copy_(bias)

    def end(self, *arguments: Any, **keywords: Any) -> None:
        """What finalize_model_grads does, with the newest biases in place."""
        self._put(self._newest)
        self._finalize(*arguments, **keywords)


class Scales:
    """The loss scales, and those of the step before; an update changes the newest ones."""

    def __init__(self, optimizer: Any) -> None:
        found = (getattr(it, "grad_scaler", None) for it in optimizers_in(optimizer))
        self._scalers = [it for it in found if it is not None]
        for at, scaler in enumerate(self._scalers):
            scaler.update = partial(self._update, at, scaler.update)
        self.forget()

    def forget(self) -> None:
        self._before = [it._scale for it in self._scalers]

    def begin(self) -> None:
        self._newest = [it._scale for it in self._scalers]
        for scaler, scale in zip(self._scalers, self._before, strict=True):
            scaler._scale = scale
        self._before = self._newest

    def _update(self, at: int, update: Callable[[bool], None], found: bool) -> None:
        self._scalers[at]._scale = self._newest[at]
        update(found)


def both(training: Training) -> tuple[Run, Run]:
    return oracle(training), delayed(training)


def check(found: list[tuple[Run, Run]], *, exact: bool = True) -> None:
    """Losses, rates and weights to the last bit, on every rank; norms but for the order of sums.

    Where steps are clipped the norm scales the gradients, which are then not ``exact``.
    """
    expected = {(run.place, n): w for run, _ in found for n, w in run.parameters.items()}
    of_last = {run.place: run for run, _ in found if run.losses[0]}
    assert any(late.losses[0] for _, late in found)
    for synchronous, late in found:
        if late.losses[0]:
            assert_equal(late.losses, of_last[late.place].losses, exact)
            assert_equal(late.held_out, of_last[late.place].held_out, exact)
        assert late.rate == synchronous.rate
        if any(synchronous.norms):
            assert late.norms[0] is None
            for norm, of_step in zip(late.norms[1:], synchronous.norms, strict=True):
                assert norm == (of_step and pytest.approx(of_step, rel=1e-5))  # None if skipped
        assert sum(late.skipped) <= sum(synchronous.skipped)
        assert late.scales[-1] == synchronous.scales[-1]
        for name, parameter in late.parameters.items():
            if exact:
                assert torch.equal(parameter, expected[late.place, name]), name
            else:
                weight = expected[late.place, name]
                torch.testing.assert_close(parameter, weight, rtol=1e-5, atol=1e-6)


def assert_equal(found: list[list[float]], expected: list[list[float]], exact: bool) -> None:
    if exact:
        assert found == expected
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


# --- cases


FULL = pytest.mark.full
BF16 = GPTCase(layers=8, dtype="bfloat16")
SCHEDULES = ["1f1b", "interleaved", "zb-h1", "v-min", "v-half", "v-zb", "auto"]


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_losses_and_weights_are_those_of_one_update_fewer(ranks: RankPools, schedule: str) -> None:
    training = Training(schedule=schedule)
    found = ranks(2).run(both, training=training)
    check(found)
    losses = next(late.losses for _, late in found if late.losses[0])
    means = [sum(of_step) / len(of_step) for of_step in losses]
    assert means[-1] < means[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_schedules(ranks: RankPools, schedule: str, optimizer: str, size: int) -> None:
    check(ranks(size).run(both, training=Training(FP32, schedule, optimizer, steps=20)))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_interleaved_in_its_own_order(ranks: RankPools, tied: bool) -> None:
    """With twice as many microbatches as ranks that order is as fast as any."""
    case = replace(FP32, tied=tied)
    check(ranks(4).run(both, training=Training(case, "interleaved", microbatches=8)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "v-half"])
def test_steps_that_are_drained_or_evaluated(ranks: RankPools, schedule: str) -> None:
    training = Training(
        schedule=schedule, steps=9, drained=(2, 3, 6), evaluated=(0, 4, 6), saved=(4,)
    )
    check(ranks(2).run(both, training=replace(training, feedback=0.5)))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "v-half"])
def test_clipped_steps(ranks: RankPools, schedule: str) -> None:
    found = ranks(2).run(both, training=Training(FP32, schedule, "sgd", clip=0.5))
    check(found, exact=False)
    assert max(norm for norm in found[0][0].norms if norm) > 0.5


PARALLEL = {
    "bf16": BF16,
    "experts": replace(FP32, options=options(**EXPERTS)),
    "tied": replace(FP32, tied=True),
    "hybrid": replace(FP32, hybrid="*-*-*-*-"),
    "dropout": replace(FP32, dropout=0.1),
    "data-parallel": replace(FP32, data_parallel=2),
    "distributed-optimizer": replace(BF16, data_parallel=2, distributed_optimizer=True),
    "distributed-optimizer-fp32": replace(FP32, data_parallel=2, distributed_optimizer=True),
    "tensor-parallel": replace(FP32, tensor_parallel=2, sequence_parallel=True),
    "expert-parallel": replace(
        FP32, data_parallel=2, expert_parallel=2, options=options(**EXPERTS)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
@pytest.mark.parametrize("name", PARALLEL)
def test_in_parallel(ranks: RankPools, name: str, schedule: str) -> None:
    case = PARALLEL[name]
    skip_without_hybrids(case)
    world = 2 * case.data_parallel * case.tensor_parallel
    found = ranks(world).run(both, training=Training(case, schedule, steps=20))
    check(found)
    assert any(any(late.arriving) for _, late in found) == case.distributed_optimizer


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_error_feedback(ranks: RankPools, optimizer: str) -> None:
    training = Training(FP32, "v-half", optimizer, feedback=1.0, steps=20)
    check(ranks(2).run(both, training=training))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "prediction"),
    [("adam", "linear"), ("muon", "linear"), ("adam", "momentum"), ("sgd", "momentum")],
)
def test_predicted_weights(ranks: RankPools, optimizer: str, prediction: str) -> None:
    training = Training(FP32, "v-half", optimizer, steps=9, evaluated=(3,), saved=(4,))
    found = ranks(2).run(both, training=replace(training, prediction=prediction))
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["distributed-optimizer", "distributed-optimizer-fp32"])
def test_predicted_weights_of_replicas(ranks: RankPools, name: str) -> None:
    training = Training(PARALLEL[name], "zb-h1", prediction="linear")
    check(ranks(4).run(both, training=training))


FP16 = GPTCase(layers=8, dtype="float16")
SCALED = {
    "alone": FP16,
    "experts": replace(FP16, options=options(**EXPERTS)),
    "distributed-optimizer": replace(FP16, data_parallel=2, distributed_optimizer=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v-half"])
@pytest.mark.parametrize("name", SCALED)
def test_loss_scales(ranks: RankPools, name: str, schedule: str) -> None:
    """Whole updates are skipped, and the scale grows and shrinks."""
    case = SCALED[name]
    training = Training(case, schedule, steps=20, evaluated=(1,), drained=(2,), saved=(9,))
    found = ranks(2 * case.data_parallel).run(both, training=replace(training, feedback=0.5))
    check(found)
    for _, late in found:
        assert 0 < sum(late.skipped) < 10
        assert len(set(late.scales)) > 2


BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.05,
}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "v-half"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_biases_of_routers(ranks: RankPools, dtype: str, schedule: str) -> None:
    case = GPTCase(layers=8, dtype=dtype, data_parallel=2, options=options(**EXPERTS, **BIASED))
    training = Training(case, schedule, steps=9, drained=(2,), evaluated=(3,), saved=(5,))
    found = ranks(4).run(both, training=training)
    check(found)
    biases = [it for _, late in found for n, it in late.parameters.items() if n.startswith("bias")]
    assert all(it.abs().max() > 0.0 for it in biases), "experts got unequal numbers of tokens"


def strengths() -> tuple[float, float]:
    """Error feedback by default, with Adam and with Muon."""
    found = []
    for name in ("adam", "muon"):
        training = Training(FP32, "v-half", name)
        with briefly(), built(replace(FP32, update_delay=1), "v-half", M) as (adapter, chunks):
            assert adapter is not None
            optimizer, scheduler = optimizer_of(training, chunks)
            adapter.delay_updates(optimizer, scheduler, chunks)
            found.append(adapter.part(DelayedPart).feedback)
    return found[0], found[1]


def test_muon_has_error_feedback_by_default(ranks: RankPools) -> None:
    assert ranks(2).run(strengths) == [(0.0, 1.0)] * 2


def test_gradients_are_reduced_behind_a_message_and_before_a_wait() -> None:
    """Another rank may wait for the reduction before it sends what this one waits for."""
    channel, message = Channel(0, 1), Message(True, 0, 0)
    instructions = (Send(channel, message), WaitReceive(channel, message), Send(channel, message))
    done: list[Any] = []
    part = SimpleNamespace(
        _start_complete=lambda: done.append("started"),
        _finish_first=lambda: done.append("finished"),
    )
    for meets in ((2,), (3,), ()):
        program = SimpleNamespace(ranks=[instructions], meets=[meets])
        steps = DelayedPart._with_reductions(cast(DelayedPart, part), cast(Program, program), 0)
        while (at := next(steps, None)) is not None:
            done.append(type(at))
    assert done == [
        *(Send, "started", WaitReceive, "finished", Send, "started"),
        *(Send, "started", WaitReceive, Send, "started", "finished"),
        *(Send, "started", WaitReceive, Send, "started"),
    ]


def dropped() -> str:
    """What a step says behind a restart that has dropped microbatches read ahead."""
    training = Training(FP32, "v-half")
    with briefly(), built(replace(FP32, update_delay=1), "v-half", M) as (adapter, chunks):
        assert adapter is not None
        optimizer, scheduler = optimizer_of(training, chunks)
        part = adapter.delay_updates(optimizer, scheduler, chunks)
        data = [batches(training, 0, 3) for _ in chunks]
        forward_backward(adapter.forward_backward_func, chunks, data, M)
        part.restart()
        with pytest.raises(UsageError) as error:
            forward_backward(adapter.forward_backward_func, chunks, data, M)
        return str(error.value)


def test_no_step_follows_where_microbatches_have_been_dropped(ranks: RankPools) -> None:
    for said in ranks(4).run(dropped):
        assert said.startswith("microbatches of this step were read ahead, and dropped")


def test_a_schedule_for_late_updates_needs_an_optimizer() -> None:
    adapter = scheduled(
        "v-half", pipeline_size=2, num_microbatches=M, layers=Layers(8), pipeline_update_delay=1
    )
    with pytest.raises(UsageError, match="call delay_updates first"):
        _ = adapter.forward_backward_func


def test_a_delay_needs_a_schedule_for_it() -> None:
    adapter = scheduled("v-half", pipeline_size=2, num_microbatches=M, layers=Layers(8))
    with pytest.raises(UsageError, match="the schedule was built without an update delay"):
        adapter.delay_updates(None, None, [])


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 5, 8])
def test_numbers_of_microbatches(ranks: RankPools, microbatches: int) -> None:
    training = Training(schedule="v-zb", steps=5, microbatches=microbatches)
    check(ranks(2).run(both, training=training))
