"""The progress of adapters: lines of the log, and curves of TensorBoard and of Weights & Biases.

The last rank prints and writes them, as it does in Megatron-LM. Curves have the tags of
Megatron-LM behind the name of the adapter, such as ``french/lm loss``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_zb.lora.adapter_file import AdapterJob
from megatron_zb.lora.training import Stepped


@dataclass(frozen=True)
class AdapterProgress:
    """One step of an adapter.

    Args:
        job: the adapter.
        step: the number of steps that it has done.
        stepped: what its optimizer has done.
        losses: by name, each a mean over the step.
        loss_scale: of the step.
        seconds: that the step took, with those of other adapters.
    """

    job: AdapterJob
    step: int
    stepped: Stepped
    losses: Mapping[str, float]
    loss_scale: float
    seconds: float

    @property
    def line(self) -> str:
        """The step in the words of Megatron-LM."""
        job, step = self.job, self.step
        norm = self.stepped.norm
        said = "".join(f" {name}: {loss:.6E} |" for name, loss in self.losses.items())
        return (
            f" adapter {job.name} | iteration {step:8d}/{job.steps:8d} | consumed samples: "
            f"{step * job.batch:12d} | elapsed time per iteration (ms): {1000 * self.seconds:.1f} "
            f"| learning rate: {self.stepped.rate:.6E} | global batch size: {job.batch:5d} |{said} "
            f"loss scale: {self.loss_scale:.1f} |"
            + ("" if norm is None else f" grad norm: {norm:.3f} |")
            + ("" if self.stepped.is_done else " skipped |")
        )

    @property
    def curves(self) -> dict[str, float]:
        """The values of the step by tag."""
        norm = self.stepped.norm
        found = {
            **self.losses,
            "learning-rate": self.stepped.rate,
            "loss-scale": self.loss_scale,
            **({} if norm is None else {"grad-norm": norm}),
        }
        return {f"{self.job.name}/{tag}": value for tag, value in found.items()}


def log(progress: AdapterProgress, args: Any) -> None:
    """Print and write a step, if its number is one that the arguments of Megatron-LM ask for."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    step, is_last = progress.step, progress.step == progress.job.steps
    if is_last or step % args.log_interval == 0:
        print(progress.line, flush=True)
    if is_last or step % args.tensorboard_log_interval == 0:
        write_curves(progress, get_tensorboard_writer(), get_wandb_writer())


def write_curves(progress: AdapterProgress, board: Any, wandb: Any) -> None:
    """Write the values of a step with TensorBoard's writer and that of wandb; None for neither."""
    if board is not None:
        for tag, value in progress.curves.items():
            board.add_scalar(tag, value, progress.step)
    if wandb is not None:
        # its own steps may not go back, and adapters are not all at the same one
        wandb.log({**progress.curves, f"{progress.job.name}/iteration": progress.step})


def say(line: str) -> None:
    """Print what the product has to say, on the first rank."""
    if dist.get_rank() == 0:
        print(f"megatron_zb: {line}", flush=True)
