#!/usr/bin/env python3
"""Step times of a real pretrain_gpt.py on CPU ranks: upstream schedules, and ours, in turns.

Every turn starts each contender once, in an order that rotates, so that a machine that gets slower
in the meantime slows all of them. A contender's time is the median of the steps that all its turns
have logged, without the first ones of each. Upstream's interleaved schedule needs four layers a
rank.

  MEGATRON_LM_PATH=/path/to/Megatron-LM python benchmarks/beside_megatron.py
  python benchmarks/beside_megatron.py --checkout /path/to/Megatron-LM --vocabulary 8192 --turns 2

Each rank has one thread; a quiet machine with a core for each is needed for figures that count.
Each contender runs once more to say where its time goes, rank by rank: in passes of each kind, and
in the rest, which is waiting for other ranks and the optimizer. Prints tables and, last, one JSON
line with the milliseconds of a step and their ratio to upstream's.

The losses of contenders whose stages are upstream 1F1B's, which begin with the same weights, are
compared with its own: the largest relative difference of any step.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from statistics import median

import provenance
from rich.console import Console
from rich.progress import track
from rich.table import Table

UPSTREAM = "upstream 1f1b"
_OURS = ("zb-h1", "v-half", "v-zb")
CONTENDERS = {
    UPSTREAM: "",
    "upstream interleaved": "--num-layers-per-virtual-pipeline-stage 2",
    **{name: f"--pipeline-schedule {name}" for name in _OURS},
    **{f"{name}, cut": f"--pipeline-schedule {name} --pipeline-vocabulary on" for name in _OURS},
    **{
        f"{name}, {n} slices": f"--pipeline-schedule {name} --pipeline-slices {n}"
        for name in ("1f1b", *_OURS)
        for n in (2, 4, 8)
    },
    "upstream 1f1b, all recomputed": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "auto, half the memory": "--pipeline-schedule auto --pipeline-recompute auto "
    "--pipeline-memory-limit 0.5",
}
_RANK = Path(__file__).with_name("accounted_rank.py")
_STEP = re.compile(
    r"iteration +(\d+)/ .*elapsed time per iteration \(ms\): ([0-9.]+).*lm loss: ([-+0-9.E]+)"
)
_PLACED_ALIKE = re.compile("1f1b|zb-h1")


def main() -> None:
    args = _arguments()
    names = args.contenders or list(CONTENDERS)
    milliseconds: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {}
    for turn in track(range(args.turns), "turns", console=Console(stderr=True)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            found, losses[name] = _steps(args, CONTENDERS[name])
            milliseconds[name] += found
    accounts = {} if args.no_account else {name: _account(args, name) for name in names}
    medians = {name: median(values) for name, values in milliseconds.items()}
    upstream, off = medians.get(UPSTREAM), _losses_off(losses)
    table = Table("contender", "ms a step", "of upstream's", "steps", "losses off by")
    for name, value in medians.items():
        ratio = f"{value / upstream:.3f}" if upstream else "-"
        losses_off = f"{off[name]:.1e}" if name in off else ""
        table.add_row(name, f"{value:.1f}", ratio, str(len(milliseconds[name])), losses_off)
    Console().print(table)
    _print_accounts(accounts)
    over_upstream = {name: value / upstream for name, value in medians.items()} if upstream else {}
    sizes = {key: value for key, value in vars(args).items() if key != "checkout"}
    said = {"sizes": sizes, "all_ms": milliseconds, "account_ms": accounts}
    last = {**said, "ms": medians, "over_upstream": over_upstream, "losses_off": off}
    print(json.dumps({**provenance.of_this_run(), **last}))


def _losses_off(losses: dict[str, list[float]]) -> dict[str, float]:
    """Return how far the losses of contenders that are placed like upstream 1F1B are from its."""
    upstream = losses.get(UPSTREAM, [])
    return {
        name: max(abs(own / other - 1) for own, other in zip(found, upstream, strict=True))
        for name, found in losses.items()
        if upstream and _PLACED_ALIKE.search(name) and name != UPSTREAM
    }


def _account(args: argparse.Namespace, name: str) -> list[dict[str, float]]:
    """Return the milliseconds of a step of each rank by kind of pass, and the rest of its time."""
    with tempfile.TemporaryDirectory() as folder:
        steps, _ = _steps(args, CONTENDERS[name], Path(folder) / "account")
        ranks = [
            json.loads((Path(folder) / f"account.{rank}").read_text()) for rank in range(args.ranks)
        ]
    counted = args.steps - args.warm_up
    result = []
    for events in ranks:
        forwards = [i for i, (kind, _, _) in enumerate(events) if kind == "F"]
        first = forwards[len(forwards) * args.warm_up // args.steps]
        spent: Counter[str] = Counter()
        for kind, start, end in events[first:]:
            spent[kind] += 1e3 * (end - start) / counted
        rest = sum(steps) / counted - sum(spent.values())
        result.append({**dict(sorted(spent.items())), "rest": rest})
    return result


def _print_accounts(accounts: dict[str, list[dict[str, float]]]) -> None:
    if not accounts:
        return
    kinds = list(dict.fromkeys(kind for ranks in accounts.values() for r in ranks for kind in r))
    kinds = [*(kind for kind in kinds if kind != "rest"), "rest"]
    table = Table("ms a step", "rank", "passes", *kinds)
    for name, ranks in accounts.items():
        for rank, spent in enumerate(ranks):
            passes = sum(spent.values()) - spent["rest"]
            columns = (f"{spent[kind]:.0f}" if kind in spent else "" for kind in kinds)
            table.add_row(name, str(rank), f"{passes:.0f}", *columns)
    Console().print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = os.environ.get("MEGATRON_LM_PATH")
    parser.add_argument("--checkout", type=Path, default=default, help="of Megatron-LM")
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks (default 2)")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default 8)")
    parser.add_argument("--hidden", type=int, default=256, help="hidden size (default 256)")
    parser.add_argument("--sequence", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="words (default 1024)")
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default 8)")
    parser.add_argument("--steps", type=int, default=8, help="of a turn (default 8)")
    parser.add_argument("--warm-up", type=int, default=3, help="steps left out (default 3)")
    parser.add_argument("--turns", type=int, default=2, help="of all contenders (default 2)")
    parser.add_argument("--no-account", action="store_true", help="only time the contenders")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, metavar="NAME")
    args = parser.parse_args()
    if args.checkout is None:
        parser.error("give --checkout, or set MEGATRON_LM_PATH")
    if args.steps <= args.warm_up:
        parser.error(f"--steps {args.steps} leaves nothing: give more than --warm-up")
    return args


def _steps(
    args: argparse.Namespace, flags: str, account: Path | None = None
) -> tuple[list[float], list[float]]:
    """Run a contender; return milliseconds of its steps without the first ones, and all losses.

    With ``account``, each rank writes what it has done there, its number appended.
    """
    heads = max(1, args.hidden // 64)
    model = f"""
    --mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocabulary} --split 90,5,5
    --make-vocab-size-divisible-by {args.ranks} --untie-embeddings-and-output-weights
    --num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {heads}
    --seq-length {args.sequence} --max-position-embeddings {args.sequence} --micro-batch-size 1
    --global-batch-size {args.microbatches} --attention-dropout 0 --hidden-dropout 0 --lr 1e-4
    --train-iters {args.steps} --eval-iters 0 --eval-interval 1000 --log-interval 1
    --pipeline-model-parallel-size {args.ranks} {flags}
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc-per-node={args.ranks}",
        *(["-m", "megatron_zb.launch"] if account is None else [str(_RANK)]),
        *(str(args.checkout / "pretrain_gpt.py"), "--cpu", *model.split()),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["ACCOUNT"] = str(account)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tempfile.gettempdir(),
    )
    found = [(int(step), float(ms), float(loss)) for step, ms, loss in _STEP.findall(done.stdout)]
    if done.returncode or len(found) < args.steps:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{said}")
    counted = [ms for step, ms, _ in found if step > args.warm_up]
    return counted, [loss for _, _, loss in found]


if __name__ == "__main__":
    main()
