"""Several trainings of one model in one pipeline, for programs with a loop of their own.

The model has what is trained beside frozen layers, such as the LoRA of Megatron-Bridge. Every
training gets a copy of the trained weights, an optimizer, and its own microbatches in each step.

Example::

    settings = Settings(pipeline_schedule="v-zb", num_microbatches=8)
    with install(settings, provider) as pipeline:
        pipeline.prepare_provider(provider)
        chunks = provider.provide_distributed_model(wrap_with_ddp=False, pre_wrap_hook=lora)
        optimizer = partial(get_megatron_optimizer, OptimizerConfig(lr=1e-4, clip_grad=1.0))
        trainings = {
            "french": SharedTraining(8, optimizer, [iter(french) for _ in chunks]),
            "german": SharedTraining(4, optimizer, [iter(german) for _ in chunks]),
        }
        shared = SharedTrainings(pipeline, chunks, trainings)
        for _ in range(steps):
            results = shared.step(forward_step, seq_length=4096, micro_batch_size=1)
            print(results["french"].losses, results["french"].norm)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from megatron_zb.bridge.pipeline import Pipeline
from megatron_zb.errors import UsageError
from megatron_zb.lora.training import AdapterOptimizer, AdapterOptimizers, wrapped
from megatron_zb.lora.whole import WholeModels
from megatron_zb.schedules.features.adapters import Adapter, Adapters


@dataclass(frozen=True)
class SharedTraining:
    """One of several trainings.

    Args:
        microbatches: of a step, on each data-parallel rank.
        optimizer: makes Megatron's optimizer of chunks of weights that are wrapped for data
            parallelism, such as ``partial(get_megatron_optimizer, config)``.
        data: iterators of its microbatches, one for each chunk of this rank.
        scheduler: makes the schedule of the learning rate of an optimizer; it has ``step`` and
            ``state_dict``. Without one the rate is that of the optimizer.
        samples: by which a step of the optimizer moves the schedule of the rate on: those of all
            replicas, as Megatron counts, or 1 for a schedule that counts steps.
    """

    microbatches: int
    optimizer: Callable[[list[Any]], Any]
    data: Sequence[Iterator[Any]]
    scheduler: Callable[[Any], Any] | None = None
    samples: int = 1


class TrainingStep(NamedTuple):
    """A step of one training.

    Args:
        losses: what the loss function has reported of each microbatch, on ranks with the output
            layer; empty elsewhere.
        norm: of the gradient; None if it was not computed.
        is_done: whether the optimizer has changed the weights.
    """

    losses: list[Any]
    norm: float | None
    is_done: bool


class _ConstantRate:
    """The schedule of a learning rate that no step changes."""

    def step(self, increment: int) -> None:
        del increment

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        del state


class SharedTrainings:
    """Several trainings of the trained weights of a model; to be made before the first step.

    Collective over the job: every rank makes it with the same trainings.

    Args:
        pipeline: the installed schedule.
        chunks: of this rank, not wrapped for data parallelism, with the weights that every
            training begins with.
        trainings: by name.
        ddp_config: of data parallelism.

    Raises:
        UsageError: nothing is trained, embedding and output layer share a trained weight, or a
            training has another number of iterators than this rank has chunks.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        chunks: Sequence[Any],
        trainings: Mapping[str, SharedTraining],
        ddp_config: DistributedDataParallelConfig | None = None,
    ) -> None:
        _check(chunks, trainings)
        self._chunks, self._trainings = list(chunks), dict(trainings)
        pipeline.adapter.current.use_adapters(self._adapters(trainings))
        self._copies = WholeModels(chunks, list(trainings), only_trained=True)
        ddp_config = ddp_config or DistributedDataParallelConfig()
        self._each = {
            name: self._optimizer_of(name, it, ddp_config) for name, it in trainings.items()
        }
        config = get_model_config(chunks[0])
        self._optimizers = AdapterOptimizers([self._copies], self._each, config)
        self._current = pipeline.adapter.current
        self._part = pipeline.adapter.train_adapters(self._optimizers)
        self._data = [
            self._part.merged({name: it.data[chunk] for name, it in trainings.items()})
            for chunk in range(len(chunks))
        ]

    def _optimizer_of(
        self, name: str, training: SharedTraining, ddp_config: DistributedDataParallelConfig
    ) -> AdapterOptimizer:
        chunks = wrapped(self._copies.weights[name], ddp_config, name)
        optimizer = training.optimizer(chunks)
        scheduler = _ConstantRate() if training.scheduler is None else training.scheduler(optimizer)
        return AdapterOptimizer(chunks, optimizer, scheduler, training.samples)

    @staticmethod
    def _adapters(trainings: Mapping[str, SharedTraining]) -> Adapters:
        return Adapters(tuple(Adapter(name, it.microbatches) for name, it in trainings.items()))

    def go_on_with(self, names: Sequence[str]) -> None:
        """Take the next steps of these trainings only, such as when others have ended; collective.

        Raises:
            UsageError: there is no such training, or none is named.
        """
        unknown = [name for name in names if name not in self._trainings]
        if unknown:
            known = ", ".join(self._trainings)
            raise UsageError(f"no training is called {' or '.join(unknown)}: there are {known}")
        left = {name: self._trainings[name] for name in names}
        self._current.use_adapters(self._adapters(left))

    def step(self, forward_step: Callable[..., Any], **sizes: Any) -> dict[str, TrainingStep]:
        """Take one step of every training that goes on.

        Args:
            forward_step: as for Megatron's schedules.
            sizes: ``seq_length`` and ``micro_batch_size``, and what else Megatron's schedules take.
        """
        adapters = self._part.rules.adapters
        names = [adapter.name for adapter in adapters.each]
        for name in names:
            self._each[name].clear()
        records = schedules.get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(self._data),
            model=self._chunks,
            num_microbatches=adapters.num_units,
            forward_only=False,
            **sizes,
        )
        losses = self._part.by_adapter(records) if records else {}
        found = {}
        for name in names:
            self._optimizers.end_step(name)
            (done,) = self._optimizers.stepped(name)
            of_step = losses[name][0] if losses else []
            found[name] = TrainingStep(of_step, done.norm, done.is_done)
        return found

    def select(self, name: str | None) -> None:
        """Let the model compute with the weights of a training, to evaluate, save or export it.

        ``None`` selects those that every training has begun with.
        """
        for chunk in range(len(self._chunks)):
            self._copies.select(chunk, name)

    def optimizer(self, name: str) -> Any:
        """Return the optimizer of a training, such as to save its states."""
        return self._each[name].optimizer

    def weights(self, name: str) -> dict[str, Any]:
        """Return the weights of a training on this rank, by their names in the whole model."""
        return self._each[name].named_weights()


def _check(chunks: Sequence[Any], trainings: Mapping[str, SharedTraining]) -> None:
    for name, training in trainings.items():
        if len(training.data) != len(chunks):
            raise UsageError(
                f"training {name} has {len(training.data)} iterators, and this rank {len(chunks)} "
                "chunks: give it one for each chunk"
            )
    trained = [w for chunk in chunks for w in chunk.parameters() if w.requires_grad]
    if not trained:
        raise UsageError("no weight of the model is trained: give one with adapters, such as LoRA")
    if any(getattr(weight, "shared_embedding", False) for weight in trained):
        raise UsageError(
            "embedding and output layer share a weight that is trained, of which every training "
            "would need two copies that stay equal: freeze it"
        )
