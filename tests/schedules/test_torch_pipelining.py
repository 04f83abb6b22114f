"""Our tables in torch's own pipeline runtime: they run and give the gradients of its 1F1B."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from ranks import RankPools
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from megatron_zb import schedules
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.interchange import from_csv, write_csv

pytestmark = pytest.mark.usefixtures("brief_searches")

RANKS = 4
LAYERS = 16  # so that 1, 2 and 4 chunks per rank share them equally
MICROBATCHES = 6
WIDTH = 5
ROWS = 3

Gradients: TypeAlias = dict[str, torch.Tensor]


class Layers(nn.Sequential):
    """Layers `first` to `last` of the model, the same weights on whichever rank they are built."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        for layer in range(first, last):
            torch.manual_seed(layer)
            linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            self.add_module(f"linear{layer}", linear)
            self.add_module(f"tanh{layer}", nn.Tanh())

    def gradients(self) -> Gradients:
        found = {name: p.grad for name, p in self.named_parameters()}
        return {name: gradient for name, gradient in found.items() if gradient is not None}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100)
    shape = (MICROBATCHES * ROWS, WIDTH)
    return torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)


def step(
    schedule: _PipelineScheduleRuntime | Schedule1F1B, is_first: bool, is_last: bool
) -> list[torch.Tensor]:
    """One training step; the losses of the microbatches on the rank of the last stage."""
    inputs, targets = batch()
    losses: list[torch.Tensor] = []
    schedule.step(
        *((inputs,) if is_first else ()),
        target=targets if is_last else None,
        losses=losses if is_last else None,
    )
    return [loss.detach() for loss in losses]


def torchs_one_f_one_b() -> tuple[Gradients, list[torch.Tensor]]:
    rank, layers = dist.get_rank(), LAYERS // RANKS
    module = Layers(rank * layers, (rank + 1) * layers)
    stage = PipelineStage(module, rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.MSELoss())
    losses = step(schedule, rank == 0, rank == RANKS - 1)
    return module.gradients(), losses


def table_in_torchs_runtime(path: str) -> tuple[Gradients, list[torch.Tensor]]:
    placement = from_csv(Path(path)).placement
    layers = LAYERS // placement.num_stages
    modules = {
        s: Layers(s * layers, (s + 1) * layers) for s in placement.stages_of[dist.get_rank()]
    }
    stages = [
        PipelineStage(module, s, placement.num_stages, torch.device("cpu"))
        for s, module in modules.items()
    ]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=nn.MSELoss())
    schedule._load_csv(path, format="compute_only")
    assert split_passes(schedule) == Path(path).read_text().count("I")
    losses = step(schedule, 0 in modules, placement.num_stages - 1 in modules)
    gradients: Gradients = {}
    for module in modules.values():
        gradients |= module.gradients()
    return gradients, losses


def split_passes(schedule: _PipelineScheduleRuntime) -> int:
    """How many input gradients torch will compute on their own, on all ranks."""
    rows = schedule.pipeline_order_with_comms.values()
    passes = (part for row in rows for action in row for part in action.sub_actions or (action,))
    return sum(action.computation_type.value == "I" for action in passes)


def whole_model(results: list[tuple[Gradients, list[torch.Tensor]]]) -> Gradients:
    """Gradients of all layers and the losses, from whichever rank has them."""
    found: Gradients = {}
    for gradients, losses in results:
        found |= gradients
        found |= {f"loss{i}": loss for i, loss in enumerate(losses)}
    assert len(found) == 2 * LAYERS + MICROBATCHES
    return found


@pytest.fixture(scope="module")
def expected(ranks: RankPools) -> Gradients:
    """Gradients and losses of torch's own 1F1B."""
    return whole_model(ranks(RANKS).run(torchs_one_f_one_b))


@pytest.mark.parametrize("name", schedules.names())
def test_torchs_runtime_trains_with_our_table(
    name: str, tmp_path: Path, ranks: RankPools, expected: Gradients
) -> None:
    """Bit for bit: the weight gradients are summed in the order of the microbatches, as in 1F1B."""
    schedule = schedules.build(name, pipeline_size=RANKS, num_microbatches=MICROBATCHES)
    check_training(schedule, tmp_path / f"{name}.csv", ranks, expected)


@pytest.mark.parametrize("name", ["dualpipe-v", "interleaved"])
def test_torchs_runtime_trains_with_our_pairs(
    name: str, tmp_path: Path, ranks: RankPools, expected: Gradients
) -> None:
    costs = schedules.Costs.uniform(pipeline_size=RANKS, forward=1, backward=1, weight=1)
    costs = costs.having(Communication(forward=0.5, backward=0.5))
    schedule = schedules.build(
        name, pipeline_size=RANKS, num_microbatches=MICROBATCHES, costs=costs
    )
    assert schedule.pairs
    check_training(schedule, tmp_path / f"{name}.csv", ranks, expected)


def check_training(
    schedule: schedules.Schedule, path: Path, ranks: RankPools, expected: Gradients
) -> None:
    write_csv(schedule, path)
    found = whole_model(ranks(RANKS).run(table_in_torchs_runtime, path=str(path)))
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert value.abs().sum() > 0
        assert torch.equal(found[key], value), key


def torchs_copy(path: str, copy: str) -> None:
    """Load a table and let torch write it, on the first rank."""
    placement = from_csv(Path(path)).placement
    stages = [
        PipelineStage(nn.Identity(), s, placement.num_stages, torch.device("cpu"))
        for s in placement.stages_of[dist.get_rank()]
    ]
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES)
    schedule._load_csv(path, format="compute_only")
    if dist.get_rank() == 0:
        schedule._dump_csv(copy, format="compute_only")


@pytest.mark.parametrize("name", schedules.names())
def test_a_table_that_torch_writes_is_read_back(
    name: str, tmp_path: Path, ranks: RankPools
) -> None:
    schedule = schedules.build(name, pipeline_size=RANKS, num_microbatches=MICROBATCHES)
    write_csv(schedule, tmp_path / "ours.csv")
    ours, torchs = str(tmp_path / "ours.csv"), str(tmp_path / "torchs.csv")
    ranks(RANKS).run(torchs_copy, path=ours, copy=torchs)
    assert from_csv(tmp_path / "torchs.csv", name=name) == schedule
