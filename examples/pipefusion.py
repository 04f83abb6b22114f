"""Sample an image from a small diffusion transformer with PipeFusion, on CPU ranks.

Each rank has a part of the blocks and keeps keys and values of the whole image. The image goes
through the ranks in patches, as megatron_zb.schedules.features.patches puts them in order. Weights
are random: the script compares how an image is sampled, not how good it is.

  python examples/pipefusion.py --pipeline-size 4 --patches 8 --time-steps 8 32
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.spawn import ProcessException, start_processes

from megatron_zb.errors import UsageError
from megatron_zb.parsing import Parser, positive
from megatron_zb.runtime.channels import Channels
from megatron_zb.runtime.executor import run_program
from megatron_zb.schedules import Costs, lower, simulate
from megatron_zb.schedules.features.patches import idle_share, pipefusion
from megatron_zb.schedules.passes import Message

BLOCKS, HIDDEN, HEADS = 8, 64, 4
CHANNELS, SIDE, TOKEN = 4, 32, 2  # of the latent image: a token has 2 x 2 of its pixels
TOKENS, PIXELS = (SIDE // TOKEN) ** 2, CHANNELS * TOKEN**2
FIRST_ANGLE = 1.5  # of the noise; DDIM turns it to 0: an image is cos(angle) * image + sin * noise


@dataclass(frozen=True)
class Sampling:
    """How an image is sampled: ``warm_up`` of all ``time_steps`` take it as one patch."""

    patches: int
    time_steps: int
    warm_up: int
    seed: int

    def angle(self, step: int) -> float:
        """Return the angle of the noise before a time step."""
        return FIRST_ANGLE * (1 - step / self.time_steps)

    @property
    def pipelined(self) -> int:
        """Time steps behind the warm-up."""
        return self.time_steps - self.warm_up


class Block(torch.nn.Module):
    """Attention and MLP, both conditioned on the time step; keeps keys and values of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.condition = torch.nn.Linear(HIDDEN, 6 * HIDDEN)
        self.qkv, self.out = torch.nn.Linear(HIDDEN, 3 * HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = (
            torch.nn.Linear(HIDDEN, 4 * HIDDEN),
            torch.nn.Linear(4 * HIDDEN, HIDDEN),
        )
        self.keys, self.values = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN)
        with torch.no_grad():
            self.qkv.weight *= 4  # so that attention is far from a mean over the image

    def forward(self, x: torch.Tensor, rows: slice, moment: torch.Tensor) -> torch.Tensor:
        """Run on the tokens of a patch, which replaces its rows of the keys and values."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.condition(moment).chunk(6)
        normed = F.layer_norm(x, (HIDDEN,)) * (1 + scale) + shift
        queries, self.keys[rows], self.values[rows] = self.qkv(normed).chunk(3, dim=1)
        q, k, v = map(heads, (queries, self.keys, self.values))
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.out(mixed.transpose(0, 1).reshape(-1, HIDDEN))
        normed = F.layer_norm(x, (HIDDEN,)) * (1 + scale_mlp) + shift_mlp
        return x + gate_mlp * self.down(F.gelu(self.up(normed)))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, HEADS, HIDDEN // HEADS).transpose(0, 1)


class Transformer(torch.nn.Module):
    """A diffusion transformer that predicts DDIM's direction for an image."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.first, self.last = torch.nn.Linear(PIXELS, HIDDEN), torch.nn.Linear(HIDDEN, PIXELS)
        self.places = torch.nn.Parameter(torch.randn(TOKENS, HIDDEN))
        self.moments = torch.nn.Linear(2, HIDDEN)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))


class Stage:
    """The blocks of one rank, and the image on the first one.

    ``forward`` runs a unit of the schedule of which :meth:`begin` has given the sizes.
    """

    def __init__(self, sampling: Sampling, rank: int, ranks: int) -> None:
        self.sampling, self.is_first, self.is_last = sampling, rank == 0, rank == ranks - 1
        self.model = Transformer(sampling.seed)
        self.blocks = self.model.blocks[rank * BLOCKS // ranks : (rank + 1) * BLOCKS // ranks]
        noise = torch.Generator().manual_seed(sampling.seed)
        self.image = torch.randn(TOKENS, PIXELS, generator=noise)
        self.predicted = torch.zeros(TOKENS, PIXELS)
        self.begin(0, sampling.warm_up, 1)

    def begin(self, first: int, steps: int, patches: int) -> None:
        """Go on with some time steps, each of which takes the image in so many patches."""
        self.first_step, self.steps, self.patches = first, steps, patches

    def forward(self, unit: int, received: torch.Tensor | None) -> torch.Tensor:
        """Run the blocks on a patch; the first stage receives what is predicted for it."""
        step, patch = divmod(unit, self.patches)
        step += self.first_step
        rows = slice(patch * TOKENS // self.patches, (patch + 1) * TOKENS // self.patches)
        angle = torch.tensor(self.sampling.angle(step))
        moment = F.silu(self.model.moments(torch.stack([angle.cos(), angle.sin()])))
        if self.is_first:
            if received is not None:
                self.update(step - 1, rows, received)
            x = self.model.first(self.image[rows]) + self.model.places[rows]
        else:
            assert received is not None, "a stage receives what the one before has made"
            x = received
        for block in self.blocks:
            x = block(x, rows, moment)
        if self.is_last:
            x = self.predicted[rows] = self.model.last(F.layer_norm(x, (HIDDEN,)))
        return x

    def update(self, step: int, rows: slice, predicted: torch.Tensor) -> None:
        """Take one step of DDIM for a patch: turn it by the difference of the angles."""
        turn = torch.tensor(self.sampling.angle(step) - self.sampling.angle(step + 1))
        self.image[rows] = self.image[rows] * turn.cos() - predicted * turn.sin()

    def empty_message(self, message: Message) -> torch.Tensor:
        """Return an empty tensor for hidden states, or for what comes back to the first stage."""
        return torch.empty(TOKENS // self.patches, HIDDEN if message.stage else PIXELS)

    def end(self) -> None:
        """Update the whole image behind the last unit, by what the last stage has predicted."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks > 1 and self.is_last:
            dist.send(self.predicted, 0)
        if ranks > 1 and self.is_first:
            dist.recv(self.predicted, ranks - 1)
        if self.is_first:
            self.update(self.first_step + self.steps - 1, slice(None), self.predicted)


def phases(sampling: Sampling) -> list[tuple[int, int, int]]:
    """The first time step, their number and the patches: of the warm-up, and of what follows."""
    return [(0, sampling.warm_up, 1), (sampling.warm_up, sampling.pipelined, sampling.patches)]


@torch.no_grad()
def sample_alone(sampling: Sampling) -> torch.Tensor:
    """Sample in this process, without a schedule: one patch after the other."""
    stage = Stage(sampling, 0, 1)
    for first, steps, patches in phases(sampling):
        stage.begin(first, steps, patches)
        predicted: dict[int, torch.Tensor] = {}
        for unit in range(steps * patches):
            predicted[unit] = stage.forward(unit, predicted.get(unit - patches))
        stage.end()
    return stage.image


@torch.no_grad()
def sample_on_rank(rank: int, ranks: int, samplings: Sequence[Sampling], folder: str) -> None:
    """Sample images as one rank of a pipeline; the first one writes them, and the seconds."""
    torch.set_num_threads(1)
    place = f"file://{folder}/ranks"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    schedule = pipefusion(ranks, patches=1, time_steps=1)
    back = schedule.rules.more_peers(schedule.placement)
    channels = Channels(range(ranks), schedule.placement, "cpu", more_peers=back)
    images = []
    for sampling in samplings:
        programs = [lower(pipefusion(ranks, patches, n)) for _, n, patches in phases(sampling)]
        stage = Stage(sampling, rank, ranks)
        dist.barrier()
        began = time.perf_counter()
        for phase, program in zip(phases(sampling), programs, strict=True):
            stage.begin(*phase)
            run_program(program, rank, {rank: stage}, channels, stage.empty_message)
            stage.end()
        images.append((stage.image, time.perf_counter() - began))
    if rank == 0:
        torch.save(images, Path(folder) / "images.pt")
    dist.barrier()
    dist.destroy_process_group()


def sample_on_ranks(samplings: Sequence[Sampling], ranks: int) -> list[tuple[torch.Tensor, float]]:
    """Start the ranks; return the images, each with the seconds of its sampling.

    Raises:
        UsageError: a rank has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, samplings, folder)
        try:
            start_processes(sample_on_rank, arguments, ranks, start_method="forkserver")
        except ProcessException as error:
            raise UsageError(f"a rank failed: {str(error).strip().splitlines()[-1]}") from error
        images: list[tuple[torch.Tensor, float]] = torch.load(Path(folder) / "images.pt")
    return images


def compare(sampling: Sampling, ranks: int, image: torch.Tensor, seconds: float) -> float:
    """Print how the image of the ranks differs from others; return its relative error.

    Raises:
        UsageError: it is not that of one process.
    """
    m, steps = sampling.patches, sampling.pipelined
    costs = Costs.uniform(pipeline_size=ranks, forward=1, backward=1, weight=0)
    idle = simulate(pipefusion(ranks, m, steps, costs), costs).bubble_rate
    alone = sample_alone(sampling)
    exact = sample_alone(replace(sampling, patches=1))
    error = float((image - exact).norm() / exact.norm())
    print(f"{sampling.time_steps} time steps, {sampling.warm_up} of them warm-up")
    print(f"  idle share: {idle:.2%} simulated, {idle_share(ranks, m, steps):.2%} by formula")
    print(f"  seconds: {seconds:.2f}")
    print(f"  relative error to sampling the whole image at once: {error:.1e}")
    if not torch.equal(image, alone):
        raise UsageError("the image of the ranks differs from that of one process, patch by patch")
    print(
        "  equal, to the last bit, to one process with the same stale keys and values", flush=True
    )
    return error


def arguments_of(words: list[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: a number is wrong.
    """
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline-size", type=positive, default=4, metavar="P", help="ranks (4)")
    parser.add_argument("--patches", type=positive, default=8, metavar="M", help="of the image (8)")
    parser.add_argument(
        "--time-steps",
        type=positive,
        nargs="+",
        default=[8, 32],
        metavar="T",
        help="of the sampler, with its warm-up; the error must not grow with them (8 32)",
    )
    parser.add_argument(
        "--warm-up",
        type=positive,
        default=1,
        metavar="N",
        help="first time steps, which take the whole image at once (1)",
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of weights and noise (1)")
    args = parser.parse_args(words)
    if args.pipeline_size > BLOCKS:
        raise UsageError(
            f"--pipeline-size is {args.pipeline_size}: there are {BLOCKS} blocks, give at most "
            f"{BLOCKS}"
        )
    if TOKENS % args.patches:
        raise UsageError(
            f"--patches is {args.patches}: the image has {TOKENS} tokens, give a divisor such as 8"
        )
    if min(args.time_steps) <= args.warm_up:
        raise UsageError(
            f"--time-steps is {min(args.time_steps)}: give more than the {args.warm_up} of the "
            "warm-up"
        )
    return args


def run(words: list[str]) -> None:
    """Sample with all numbers of time steps, the smallest first, and compare.

    Raises:
        UsageError: an argument is wrong, a rank has failed, or an image is not what it must be.
    """
    args = arguments_of(words)
    torch.set_num_threads(1)
    samplings = [
        Sampling(args.patches, steps, args.warm_up, args.seed) for steps in sorted(args.time_steps)
    ]
    print(f"{args.pipeline_size} ranks, {args.patches} patches, {BLOCKS} blocks", flush=True)
    images = sample_on_ranks(samplings, args.pipeline_size)
    errors = [
        compare(sampling, args.pipeline_size, *image)
        for sampling, image in zip(samplings, images, strict=True)
    ]
    if errors != sorted(errors, reverse=True):
        raise UsageError("the relative error grows with the time steps: give numbers further apart")


def main() -> int:
    """Run; an error is one sentence."""
    try:
        run(sys.argv[1:])
    except UsageError as error:
        print(f"pipefusion.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
