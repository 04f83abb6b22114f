"""What ``megatron-zb plan`` predicts for the trainings of step_times.py, and their largest model.

Needs no GPU. Layers are spread evenly, as in the trainings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from layer_sizes import LayerSizes

from megatron_zb.errors import UsageError
from megatron_zb.measured.config import path_of
from megatron_zb.plan.device import DeviceConfig, read_device
from megatron_zb.plan.features.catalog import asking
from megatron_zb.plan.features.vocabulary import PlanVocabulary
from megatron_zb.plan.model import ModelConfig
from megatron_zb.plan.prediction import ordered
from megatron_zb.plan.rows import Prediction
from megatron_zb.plan.search import searched_by_auto
from megatron_zb.plan.settings import PlanJob
from megatron_zb.plan.stages import StageWorkload
from megatron_zb.plan.strategy import MEGATRON_1F1B, Strategy, candidates_of, of_family
from megatron_zb.plan.work import Workload
from megatron_zb.schedules import catalog
from megatron_zb.schedules.layout import Layers, spread
from megatron_zb.schedules.placement import Placement

DEVICES = {
    "GB300": "gb300_nvl72",
    "GB200": "gb200_nvl72",
    "B200": "b200_sxm",
    "H200": "h200_sxm",
    "H100": "h100_sxm",
    "A100": "a100_80gb_sxm",
    "MI300X": "mi300x",
}
"""Descriptions of ``configs/devices`` by a word of the name that torch has for a GPU."""

USUAL = "h100_sxm"
FILLED = (
    0.75  # of the memory, for 1F1B by the count of a plan: interleaved needs up to a quarter more
)
HEAD = 128
WIDTHS = range(1024, 16384 + 1, 512)


def device_of(name: str | None, memory: int | None = None) -> DeviceConfig | None:
    """Return the description of a GPU by torch's name for it, None if there is none.

    Args:
        name: None for a CPU, whose predictions are those of the usual GPU.
        memory: its bytes, in place of the description's.
    """
    found = next((f for word, f in DEVICES.items() if word in (name or USUAL).upper()), None)
    if found is None:
        return None
    device = read_device(path_of("--device", "devices", Path(found)))
    return device if memory is None else device.with_memory(memory)


def wider(sizes: LayerSizes, hidden: int) -> LayerSizes:
    """Return the sizes of layers with another hidden size, and heads and an MLP to match."""
    ffn = 256 * round(hidden * 8 / 3 / 256)
    return replace(sizes, hidden=hidden, heads=hidden // HEAD, ffn_hidden=ffn)


@dataclass(frozen=True)
class PlannedTraining:
    """A GPT on pipeline ranks only, as the plan has it."""

    sizes: LayerSizes
    layers: int
    ranks: int
    microbatches: int
    device: DeviceConfig

    def prediction(self, schedule: str) -> Prediction:
        """Predict a schedule, by its name in step_times.py.

        Raises:
            UsageError: there is no such schedule, or it cannot be built.
        """
        name, _, way = schedule.partition("+")
        if name == "auto":
            return self._of_auto()
        chunks = int(way.removesuffix("chunks")) if way else None
        one_f_one_b, interleaved = candidates_of(())[:2]
        if name.startswith("megatron"):
            candidate = one_f_one_b if chunks is None else interleaved
        else:
            candidate = of_family(name)
        staged = self._staged(candidate.placement(self.ranks, chunks))
        iteration = self._job.iteration(self.microbatches, splits=candidate.splits)
        return ordered(staged, candidate, iteration, chunks).predicted()

    def predicted(self, schedule: str) -> dict[str, Any]:
        """Return the figures of a prediction, or why there is none."""
        try:
            found = self.prediction(schedule)
        except UsageError as error:
            return {"not_predicted": str(error)}
        return {
            "step_seconds": found.seconds,
            "tokens_per_second": found.tokens_per_gpu * found.gpus,
            "bubble": found.bubble,
            "peak_bytes": _of_tensors(found),
        }

    @property
    def bytes_of_1f1b(self) -> float:
        """Bytes of the worst rank under Megatron's own 1F1B, as the driver counts them."""
        return self.prediction("megatron").memory.total

    def _of_auto(self) -> Prediction:
        """Predict what ``auto`` finds in the memory of Megatron's own 1F1B."""
        limited = replace(self._job, memory=self.bytes_of_1f1b)
        placements = catalog.possible_placements(
            catalog.family("auto"), self.ranks, None, self.layers
        )
        candidate = of_family("auto")
        found = [
            searched_by_auto(limited, candidate, self._staged(placement), self.microbatches)
            for placement in placements
        ]
        fitting = [each for each in found if each is not None]
        if not fitting:
            raise UsageError(f"auto finds no order in the memory of {MEGATRON_1F1B}")
        return min(fitting, key=lambda each: each.seconds)

    @cached_property
    def _model(self) -> ModelConfig:
        sizes = self.sizes
        return ModelConfig.model_validate(
            {
                "name": "the model of this check",
                "source": "benchmarks/gpu/step_times.py",
                "layers": self.layers,
                "hidden_size": sizes.hidden,
                "attention_heads": sizes.heads,
                "ffn_hidden_size": sizes.ffn_hidden,
                "gated_mlp": True,
                "rotary": {"base": 10000},
                "vocabulary": sizes.vocabulary,
                "sequence_length": sizes.seq_length,
                "global_batch_size": self.microbatches * sizes.micro_batch_size,
            }
        )

    @cached_property
    def _job(self) -> PlanJob:
        model = self._model
        return PlanJob(
            model=model,
            device=self.device,
            gpus=self.ranks,
            memory=self.device.memory_bytes,
            global_batch=model.global_batch_size,
            sequence=model.sequence_length,
            features=asking(PlanVocabulary("off")),
        )

    def _staged(self, placement: Placement) -> StageWorkload:
        strategy = Strategy(1, self.ranks, 1, 1, self.sizes.micro_batch_size, "none")
        load = Workload(self._model, self.device, strategy, self.sizes.seq_length, False)
        return StageWorkload(load, placement, spread(Layers(self.layers), placement))


def _of_tensors(found: Prediction) -> float:
    """Return the bytes of a prediction that torch's allocator hands out."""
    parts = found.memory.parts()
    return sum(size for name, size in parts.items() if name not in ("reserved", "fragmentation"))


def largest_first(training: PlannedTraining) -> Iterator[LayerSizes]:
    """Yield sizes that the plan counts to fit under Megatron's own 1F1B, the largest first."""
    for hidden in reversed(WIDTHS):
        sizes = wider(training.sizes, hidden)
        needed = replace(training, sizes=sizes).bytes_of_1f1b
        if needed <= FILLED * training.device.memory_bytes:
            yield sizes


def chunk_counts(layers_per_rank: int) -> list[int]:
    """Return the numbers of chunks per rank to try for Megatron's interleaved: 2, 4, ..."""
    counts, count = [], 2
    while layers_per_rank % count == 0:
        counts.append(count)
        count *= 2
    return counts
