#!/usr/bin/env python3
"""Does a model learn as well when updates come late? Trains a small GPT on real text to find out.

One process and plain torch, as a delay needs no pipeline: it keeps earlier weights, takes the
gradient there, and applies the update to the newest ones. Modes:

  sync        each update before the next microbatches
  delay       one update late everywhere: PipeDream-2BW, arXiv 2006.09503
  feedback    the same, with error feedback, arXiv 2606.30634
  prediction  the same, computing with weights ahead: by the moments of AdamW and SGD, arXiv
              2312.00839, and with Muon along the newest update, arXiv 2003.11666

and for research, with delays that grow with the distance from the end of a pipeline of p stages:

  by-depth                    stage k is p-1-k updates late, B like F: PipeDream
  backpropagation             F is 2(p-1-k) late, B uses the newest weights: arXiv 2003.11666
  backpropagation-prediction  the same, F with weights ahead by as many updates
  backpropagation-spike       the same, with spike compensation (SGD only)
  partime                     backpropagation whose stages are single layers, as each works in each
                              unit of time, arXiv 2210.09147; a sample keeps its own activations

The text is the source code of this Python's standard library, one token per byte. Every twentieth
file is held out as a whole. A seed draws the model and the order of the text, so all modes with one
seed see the same. The loss is that of the newest weights, in nats per byte. Learning rates are
those of the synchronous runs, tuned briefly, and stay as they are for the other modes.

  python benchmarks/delayed_convergence.py --mode sync delay --seed 1 2 --results runs.json
  python benchmarks/delayed_convergence.py --table --results runs.json

Prints each run; --results also keeps them, and leaves out what it has. --table runs nothing, and
prints the kept runs in Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import provenance
import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_zb.runtime import update_rules
from megatron_zb.train.corpus import END_OF_DOCUMENT, library_files

VOCABULARY = END_OF_DOCUMENT + 1
HELD_OUT = 20
"""Of so many files, one is held out."""
LEARNING_RATES = {"adamw": 2e-3, "muon": 16e-3, "sgd": 0.03}
"""Of the synchronous runs; the best of those tried at the default sizes."""
MOMENTUM = 0.9
"""Of SGD; Muon has 0.95."""
PUBLISHED = {
    ("muon", "sync"): "2.578; 1.906",
    ("muon", "delay"): "+0.012; +0.005",
    ("muon", "feedback"): "+0.005; 0.000",
    ("adamw", "delay"): "more than +0.2",
}
"""Validation losses of arXiv 2606.30634: SmolLM-360M; a mixture of experts with 10B weights."""
FOUND = ("parameters", "finite", "held_out", "training", "cpu_seconds")
"""What a run finds out, as against what it depends on."""
MODES = (
    *("sync", "delay", "feedback", "prediction", "by-depth", "backpropagation"),
    *("backpropagation-prediction", "backpropagation-spike", "partime"),
)


def main() -> int:
    args = _arguments()
    kept = _kept(args.results)
    if args.table:
        print("\n".join(tables(kept["runs"])))
        return 0
    torch.set_num_threads(1)
    text = Text.of_files(library_files())
    for seed, optimizer, mode in product(args.seed, args.optimizer, args.mode):
        for rate in args.learning_rate or [LEARNING_RATES[optimizer]]:
            run = settings(args, optimizer, mode, seed, rate)
            if any(run.items() <= done.items() for done in kept["runs"]):
                continue
            found = {**run, **train(run, text)}
            print(json.dumps(found), flush=True)
            kept["runs"].append(found)
            if args.results:
                _keep({**kept, **provenance.of_this_run()}, args.results)
    return 0


def settings(
    args: argparse.Namespace, optimizer: str, mode: str, seed: int, rate: float
) -> dict[str, Any]:
    """All that a run depends on."""
    names = ("steps", "sequences", "sequence", "layers", "hidden", "heads", "stages")
    sizes = {name: vars(args)[name] for name in names}
    if mode == "partime":
        sizes["stages"] = 2 * args.layers + 2
    return {"optimizer": optimizer, "mode": mode, "seed": seed, "learning_rate": rate, **sizes}


# --- the text


class Text:
    """Tokens to train on, and others that are held out."""

    def __init__(self, training: Tensor, held_out: Tensor) -> None:
        self.training, self.held_out = training, held_out

    @staticmethod
    def of_files(files: Sequence[Path]) -> Text:
        """Read whole files, and hold out every twentieth of them."""
        kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
        for place, file in enumerate(files):
            text = bytearray(file.read_bytes() + b" ")
            tokens = torch.frombuffer(text, dtype=torch.uint8).to(torch.int16)
            tokens[-1] = END_OF_DOCUMENT
            kinds[place % HELD_OUT == HELD_OUT - 1].append(tokens)
        training, held_out = (torch.cat(tokens) for tokens in kinds)
        return Text(training, held_out)

    def batches(self, seed: int, sequences: int, length: int) -> Iterator[Tensor]:
        """Draw windows of ``length`` tokens and the one after: [sequences, length + 1]."""
        generator = torch.Generator().manual_seed(seed)
        last = len(self.training) - length
        while True:
            starts = torch.randint(last, (sequences,), generator=generator).tolist()
            rows = [self.training[start : start + length + 1] for start in starts]
            yield torch.stack(rows).long()

    def held_out_windows(self, windows: int, length: int) -> Tensor:
        """Windows at equal distances, the same for every run: [windows, length + 1]."""
        far = (len(self.held_out) - length - 1) // windows
        rows = [self.held_out[at * far : at * far + length + 1] for at in range(windows)]
        return torch.stack(rows).long()


# --- the model, as a sequence of layers


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, hidden: int, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, hidden) * 0.02)
        self.places = nn.Parameter(torch.randn(sequence, hidden) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.tokens) + self.places


class Attention(nn.Module):
    """Causal attention after a norm, added to its input."""

    def __init__(self, hidden: int, heads: int, scale: float) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(hidden), heads
        self.qkv = nn.Parameter(torch.randn(3 * hidden, hidden) * 0.02)
        self.out = nn.Parameter(torch.randn(hidden, hidden) * scale)

    def forward(self, x: Tensor) -> Tensor:
        n, s, h = x.shape
        split = (self.norm(x) @ self.qkv.T).view(n, s, 3, self.heads, h // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + seen.transpose(1, 2).reshape(n, s, h) @ self.out.T


class Perceptron(nn.Module):
    """Two matrices after a norm, added to their input."""

    def __init__(self, hidden: int, scale: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Parameter(torch.randn(4 * hidden, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(hidden, 4 * hidden) * scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.gelu(self.norm(x) @ self.up.T) @ self.down.T


class Head(nn.Module):
    """A norm, and the logits."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.logits = nn.Parameter(torch.randn(VOCABULARY, hidden) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) @ self.logits.T


def layers_of(run: dict[str, Any]) -> list[nn.Module]:
    """Make the layers with weights that the seed draws."""
    torch.manual_seed(run["seed"])
    hidden, count = run["hidden"], run["layers"]
    scale = 0.02 / math.sqrt(2 * count)
    layers: list[nn.Module] = [Embedding(hidden, run["sequence"])]
    for _ in range(count):
        layers += [Attention(hidden, run["heads"], scale), Perceptron(hidden, scale)]
    return [*layers, Head(hidden)]


def stages_of(layers: Sequence[nn.Module], stages: int) -> list[list[nn.Module]]:
    """Split consecutive layers into stages of about equal numbers of layers."""
    cuts = [round(len(layers) * stage / stages) for stage in range(stages + 1)]
    return [list(layers[start:end]) for start, end in pairwise(cuts)]


def loss_of(layers: Sequence[nn.Module], tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, for windows with the token after them."""
    x = tokens[:, :-1]
    for layer in layers:
        x = layer(x)
    return functional.cross_entropy(x.flatten(0, 1), tokens[:, 1:].flatten())


# --- optimizers


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon that orthogonalizes in float32: its bf16 takes a CPU about 40 times as long.

    Nesterov's momentum, decoupled decay, and steps as large as those of AdamW, arXiv 2502.16982.
    """

    def __init__(self, params: Any, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, beta = group["lr"], group["momentum"]
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - beta)
                way = orthogonalized(p.grad.lerp(momentum, beta))
                p.mul_(1 - rate * group["weight_decay"])
                p.add_(way, alpha=-rate * 0.2 * math.sqrt(max(p.shape)))


def orthogonalized(matrix: Tensor) -> Tensor:
    """Set all singular values to about 1, by five steps of Newton and Schulz in float32."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.T
        factor = torch.addmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, factor, x, beta=3.4445)
    return x if wide is matrix else x.T


class SpikeSGD(torch.optim.SGD):
    """SGD that lets a gradient which is D updates late do at once what it would have done by now.

    v <- mu v + g;  W <- W - lr (mu^D v + (1 - mu^D) / (1 - mu) g). D is the group's ``delay``.
    Source: spike compensation, arXiv 2003.11666.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            mu, rate = group["momentum"], group["lr"]
            of_momentum = mu ** group["delay"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.mul_(mu).add_(p.grad)
                p.add_(momentum, alpha=-rate * of_momentum)
                p.add_(p.grad, alpha=-rate * (1 - of_momentum) / (1 - mu))


def optimizers_of(
    run: dict[str, Any], layers: Sequence[nn.Module], newest: Sequence[Sequence[nn.Parameter]]
) -> list[torch.optim.Optimizer]:
    """Make the optimizers: matrices of the blocks decay in AdamW and Muon, no other weight does.

    Args:
        run: settings.
        layers: in model order.
        newest: the weights to step, by stage, in the order of those of the layers.
    """
    rate = run["learning_rate"]
    if run["optimizer"] == "sgd":
        stages = zip(newest, delays_of(run).late, strict=True)
        groups = [{"params": stage, "delay": late} for stage, late in stages]
        kind = SpikeSGD if run["mode"] == "backpropagation-spike" else torch.optim.SGD
        return [kind(groups, lr=rate, momentum=MOMENTUM)]
    in_blocks = [
        it.ndim == 2 and isinstance(layer, (Attention, Perceptron))
        for layer in layers
        for it in layer.parameters()
    ]
    every = list(zip(chain.from_iterable(newest), in_blocks, strict=True))
    matrices = [it for it, chosen in every if chosen]
    others = [it for it, chosen in every if not chosen]
    rest: dict[str, Any] = {"lr": rate, "betas": (0.9, 0.95), "weight_decay": 0.0}
    if run["optimizer"] == "muon":
        return [Muon(matrices, rate, 0.1), torch.optim.AdamW(others, **rest)]
    both: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
    return [torch.optim.AdamW(both, **rest)]


# --- a run


class Delays(NamedTuple):
    """How late each stage is, and what is done about it."""

    late: list[int]
    """Updates between the weights of F and the newest, by stage."""
    newest_in_backward: bool
    rule: Callable[[int], update_rules.UpdateRule]
    """The rule of a stage that is so many updates late."""


def delays_of(run: dict[str, Any]) -> Delays:
    mode, stages = run["mode"], range(run["stages"])
    plain = _rule(update_rules.PlainUpdate)
    ahead: Callable[[int], update_rules.UpdateRule] = update_rules.WeightPrediction
    if run["optimizer"] == "muon":
        ahead = update_rules.LinearPrediction
    if mode == "sync":
        return Delays([0 for _ in stages], False, plain)
    if mode == "by-depth":
        return Delays([len(stages) - 1 - k for k in stages], False, plain)
    if mode in ("delay", "feedback", "prediction"):
        feedback = _rule(update_rules.ErrorFeedback)
        rules = {"delay": plain, "feedback": feedback, "prediction": ahead}
        return Delays([1 for _ in stages], False, rules[mode])
    late = [2 * (len(stages) - 1 - k) for k in stages]
    return Delays(late, True, ahead if mode == "backpropagation-prediction" else plain)


def _rule(kind: Callable[[], update_rules.UpdateRule]) -> Callable[[int], update_rules.UpdateRule]:
    return lambda _late: kind()


def train(run: dict[str, Any], text: Text) -> dict[str, Any]:
    """Train, and return the losses and the time; a loss that is no number ends the run."""
    training = Training(run)
    steps, start, losses, held_out = run["steps"], time.process_time(), [], []
    windows = text.held_out_windows(256, run["sequence"])
    batches = text.batches(run["seed"], run["sequences"], run["sequence"])
    for step in range(steps):
        losses.append(training.step(next(batches), step))
        if not math.isfinite(losses[-1]):
            break
        if (step + 1) % (steps // 2) == 0:
            held_out.append(round(training.held_out_loss(windows), 5))
    tenth = steps // 10
    means = [statistics.mean(losses[at : at + tenth]) for at in range(0, len(losses), tenth)]
    return {
        "parameters": sum(it.numel() for it in training.every),
        "finite": math.isfinite(losses[-1]),
        "held_out": held_out,
        "training": [round(mean, 5) for mean in means if math.isfinite(mean)],
        "cpu_seconds": round(time.process_time() - start, 1),
    }


class Training:
    """A model, its newest weights, and the earlier ones that it computes with."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._run, self._layers, self._delays = run, layers_of(run), delays_of(run)
        late = self._delays.late
        self._computing = [
            [it for layer in stage for it in layer.parameters()]
            for stage in stages_of(self._layers, run["stages"])
        ]
        self.newest = [
            [nn.Parameter(it.detach().clone()) for it in stage] for stage in self._computing
        ]
        self.every = [it for stage in self.newest for it in stage]
        self.optimizers = optimizers_of(run, self._layers, self.newest)
        self._rules = [self._delays.rule(each) for each in late]
        self._versions = [
            deque([_copied(stage)] * (each + 1), each + 1)
            for stage, each in zip(self.newest, late, strict=True)
        ]

    def step(self, tokens: Tensor, step: int) -> float:
        """Run an update and return the loss."""
        self._compute_with([kept[0] for kept in self._versions])
        loss = loss_of(self._layers, tokens)
        if self._delays.newest_in_backward:
            self._compute_with(self.newest)  # where autograd has kept the weights
        computing = [it for stage in self._computing for it in stage]
        gradients = torch.autograd.grad(loss, computing)
        for parameter, gradient in zip(self.every, gradients, strict=True):
            parameter.grad = gradient
        nn.utils.clip_grad_norm_(self.every, 1.0)
        self._set_rate(step)
        update: Callable[[], object] = self._step_optimizers
        for rule, stage in zip(self._rules, self.newest, strict=True):
            update = partial(rule.step, stage, update)
        update()
        self._set_rate(step + 1)
        for rule, stage, kept in zip(self._rules, self.newest, self._versions, strict=True):
            kept.append(rule.ahead(stage, self.optimizers[0]) or _copied(stage))
        return loss.item()

    @torch.no_grad()
    def held_out_loss(self, windows: Tensor) -> float:
        """Mean loss of the newest weights."""
        self._compute_with(self.newest)
        return statistics.mean(loss_of(self._layers, part).item() for part in windows.split(32))

    def _step_optimizers(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def _set_rate(self, step: int) -> None:
        """A tenth of the steps warms up; from there the rate falls in a line to a tenth of it."""
        steps = self._run["steps"]
        warm = max(1, steps // 10)
        share = (step + 1) / warm if step < warm else 1 - 0.9 * (step - warm) / (steps - warm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = share * self._run["learning_rate"]

    def _compute_with(self, weights: Sequence[Sequence[Tensor]]) -> None:
        for stage, given in zip(self._computing, weights, strict=True):
            for parameter, value in zip(stage, given, strict=True):
                parameter.data.copy_(value)  # as ``data``: unseen by a graph that has been made


def _copied(weights: Sequence[Tensor]) -> list[Tensor]:
    return [it.detach().clone() for it in weights]


# --- results


def _kept(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {"runs": []}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _keep(results: dict[str, Any], path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def tables(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of Markdown: a table for each optimizer and size, and the learning rates tried."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        varied = ("mode", "seed", "stages", *FOUND)
        same = {name: value for name, value in run.items() if name not in varied}
        alike.setdefault(json.dumps(same), []).append(run)
    lines = []
    for each in alike.values():
        if {run["mode"] for run in each} != {"sync"}:
            lines += [*_table(each), ""]
    tried = [
        run for each in alike.values() for run in each if {it["mode"] for it in each} == {"sync"}
    ]
    if tried:
        lines += ["| optimizer | steps | learning rate | held-out loss |", "|---|--:|--:|--:|"]
    tried.sort(key=lambda run: (run["optimizer"], run["learning_rate"]))
    for run in tried:
        cells = run["optimizer"], run["steps"], f"{run['learning_rate']:g}", _loss(run)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def _table(runs: Sequence[dict[str, Any]]) -> list[str]:
    one = runs[0]
    words = (
        f"{one['optimizer']}, learning rate {one['learning_rate']:g}: {one['parameters']} weights, "
        f"{one['steps']} updates of {one['sequences']} x {one['sequence']} tokens"
    )
    lines = [
        words,
        "",
        "| mode | stages | seeds | held-out loss | difference to sync | published |",
    ]
    lines.append("|---|--:|--:|--:|--:|--:|")
    synchronous = {run["seed"]: run for run in runs if run["mode"] == "sync"}
    for mode in MODES:
        found = [run for run in runs if run["mode"] == mode]
        if not found:
            continue
        depth = "" if mode in MODES[:4] else str(found[0]["stages"])
        if all(run["finite"] for run in found):
            loss = _spread([run["held_out"][-1] for run in found], "")
        else:
            loss = ", ".join(_loss(run) for run in found)
        pairs = [(run, synchronous[run["seed"]]) for run in found if run["seed"] in synchronous]
        apart = [a["held_out"][-1] - b["held_out"][-1] for a, b in pairs if a["finite"]]
        gap = _spread(apart, "+") if mode != "sync" and apart else ""
        published = PUBLISHED.get((one["optimizer"], mode), "")
        cells = mode, depth, str(len(found)), loss, gap, published
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _loss(run: dict[str, Any]) -> str:
    return f"{run['held_out'][-1]:.3f}" if run["finite"] else "no number"


def _spread(values: Sequence[float], sign: str) -> str:
    """The mean, and the standard deviation over the seeds."""
    mean = f"{statistics.mean(values):{sign}.4f}"
    return f"{mean} ± {statistics.stdev(values):.4f}" if len(values) > 1 else mean


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--optimizer",
        nargs="+",
        default=["adamw", "muon"],
        choices=LEARNING_RATES,
        help="default: adamw muon",
    )
    parser.add_argument(
        "--mode",
        nargs="+",
        default=list(MODES[:4]),
        choices=MODES,
        metavar="MODE",
        help="default: sync delay feedback prediction",
    )
    parser.add_argument("--seed", nargs="+", type=int, default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--steps", type=int, default=200, help="updates, 20 or more (default 200)")
    parser.add_argument("--sequences", type=int, default=8, help="of an update (default 8)")
    parser.add_argument("--sequence", type=int, default=64, help="tokens of each (default 64)")
    parser.add_argument("--layers", type=int, default=4, help="default 4")
    parser.add_argument("--hidden", type=int, default=96, help="hidden size (default 96)")
    parser.add_argument("--heads", type=int, default=4, help="default 4")
    parser.add_argument(
        "--stages",
        type=int,
        default=5,
        help="of the pipeline, for delays by depth; attention and perceptron count as one layer "
        "each, and so do embedding and head (default 5)",
    )
    parser.add_argument(
        "--learning-rate",
        nargs="+",
        type=float,
        metavar="RATE",
        help="one or more (default: the tuned one)",
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON to keep runs in")
    parser.add_argument("--table", action="store_true", help="print the runs of --results")
    args = parser.parse_args()
    if args.steps < 20:
        parser.error(f"--steps {args.steps}: too few to tell anything, give 20 or more")
    if "backpropagation-spike" in args.mode and set(args.optimizer) != {"sgd"}:
        parser.error("--mode backpropagation-spike changes the step of SGD: give --optimizer sgd")
    if args.hidden % args.heads:
        parser.error(f"--hidden {args.hidden} cannot be split among --heads {args.heads}")
    if args.stages > 2 * args.layers + 2:
        parser.error(f"--stages {args.stages}: --layers {args.layers} fill {2 * args.layers + 2}")
    return args


if __name__ == "__main__":
    sys.exit(main())
