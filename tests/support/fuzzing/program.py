"""The program scripts/fuzz.py: combinations of settings, trained by upstream and by ours."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fuzzing.command import commands_of
from fuzzing.covering import Pair, all_pairs, covering_array, pairs_of, possible_pairs
from fuzzing.drawing import draw
from fuzzing.shrinking import shrink
from fuzzing.space import Combination, Space, space_of
from fuzzing.trial import Bench, Trial, Verdict, judge
from megatron_zb.megatron_lm.checkout import checkout_at

HELP = """\
Train combinations of settings with the real pretrain_gpt.py of a Megatron-LM checkout on CPU ranks:
with upstream's own schedule, and with --pipeline-schedule, from one checkpoint or a fresh start.

Each run compares every number of both logs (losses with ten digits; norms but for the rounding of
sums over ranks), and the verdict of `megatron-zb check` with what the start of the job does. One
line of JSON tells what has become of it:

  equal                            all numbers agree
  refused by ours, as check says   upstream trains, ours ends with one sentence
  refused by both                  upstream does not train, and check says so
  crashed by both                  upstream raises or hangs in mid-training, which no check foresees
  different numbers | crashed | hung | check and start disagree    a failure

A combination gives each of the settings in tests/support/fuzzing/settings.yaml a value. --pairs
runs combinations in which every possible pair of values occurs; with --beyond, every pair that no
equal run of earlier results has; --random draws combinations of
three and more unusual settings each, by --seed and their number.

exit code: 0 if nothing failed, 1 otherwise.

examples:
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --pairs > pairs.jsonl
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --pairs --seed 2 --beyond pairs.jsonl >> pairs.jsonl
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --random --seed 7 --count 20
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --pairs --count 20 --fix model=hybrid
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --show 7/12     prints two commands to type
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --random --only 7/12
  scripts/fuzz.py --megatron-lm ~/Megatron-LM --set schedule=v-zb experts=aux data=2
"""


def main() -> int:
    arguments = _parser().parse_args()
    checkout = checkout_at(arguments.megatron_lm.resolve())
    space = space_of(".".join(map(str, checkout.version[:2])))
    chosen = list(_chosen(arguments, space))
    if arguments.show:
        for _, combination in chosen:
            commands = commands_of(space, combination)
            print(f"upstream: {commands.typed(checkout.root, commands.upstream)}")
            print(f"ours:     {commands.typed(checkout.root, commands.ours)}")
        return 0
    os.environ["MEGATRON_LM_PATH"] = str(checkout.root)
    with tempfile.TemporaryDirectory(prefix="searches-") as folder:
        os.environ["TESTS_KEPT_SEARCHES"] = folder
        return _run_all(Bench(space, checkout.root), chosen, arguments.shrink)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megatron-lm", type=Path, required=True, metavar="CHECKOUT")
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--pairs", action="store_true", help="every possible pair of values")
    kinds.add_argument("--random", action="store_true", help="three and more unusual settings")
    kinds.add_argument("--show", metavar="SEED/NUMBER", help="print the commands of a drawn one")
    kinds.add_argument("--only", metavar="SEED/NUMBER", help="run a drawn one")
    kinds.add_argument("--set", nargs="+", metavar="SETTING=VALUE", help="run this one, else usual")
    parser.add_argument("--seed", default="0", help="of what is drawn (default: 0)")
    parser.add_argument("--count", type=int, help="at most so many (default: all pairs, 10 drawn)")
    parser.add_argument(
        "--shrink", action="store_true", help="find the few settings that each failure needs"
    )
    parser.add_argument(
        "--beyond", nargs="+", type=Path, default=[], metavar="FILE", help="results of earlier runs"
    )
    parser.add_argument(
        "--fix", nargs="+", default=[], metavar="SETTING=VALUE", help="only combinations with these"
    )
    parser.add_argument("--first", type=int, default=0, help="leave out those before this number")
    return parser


def _chosen(arguments: argparse.Namespace, space: Space) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield combinations with their names."""
    seed, first, count = arguments.seed, arguments.first, arguments.count
    if one := arguments.show or arguments.only:
        yield one, draw(space, one)
    elif arguments.set:
        usual = {name: setting.default for name, setting in space.settings.items()}
        yield "set", {**usual, **dict(each.split("=", 1) for each in arguments.set)}
    elif arguments.pairs:
        covered = {pair for file in arguments.beyond for pair in _equal_pairs(space, file)}
        rows = enumerate(covering_array(_fixed(arguments, space), seed, covered))
        stop = None if count is None else first + count
        yield from ((f"pairs {seed}/{n}", row) for n, row in islice(rows, first, stop))
    else:
        names = (f"{seed}/{n}" for n in range(first, first + (count or 10)))
        yield from ((name, draw(_fixed(arguments, space), name)) for name in names)


def _fixed(arguments: argparse.Namespace, space: Space) -> Space:
    for each in arguments.fix:
        space = space.with_fixed(*each.split("=", 1))
    return space


def _equal_pairs(space: Space, file: Path) -> Iterator[Pair]:
    """Yield the pairs of the equal runs among results; those of another series are left out."""
    usual = {name: setting.default for name, setting in space.settings.items()}
    for line in file.read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run.get("verdict") == Verdict.EQUAL.value and run["megatron"] == space.series:
            yield from pairs_of({**usual, **run["unusual"]})


def _run_all(bench: Bench, chosen: list[tuple[str, dict[str, str]]], shrinks: bool) -> int:
    space, counts, covered = bench.space, Counter[Verdict](), set[Any]()
    for name, combination in chosen:
        trial = judge(bench, combination)
        counts[trial.verdict] += 1
        if trial.verdict is Verdict.EQUAL:
            covered |= pairs_of(combination)
        unusual = space.unusual(combination)
        print(trial.as_json(name=name, megatron=space.series, unusual=unusual), flush=True)
        if shrinks and trial.verdict.is_failure:
            small = shrink(space, combination, partial(_fails_alike, bench, trial))
            print(json.dumps({"name": name, "shrunk": space.unusual(small)}), flush=True)
    possible = len(possible_pairs(space))
    summary = {verdict.value: counts[verdict] for verdict in Verdict if counts[verdict]}
    pairs = {"all": len(all_pairs(space)), "possible": possible, "equal": len(covered)}
    print(json.dumps({"verdicts": summary, "pairs": pairs}), file=sys.stderr)
    return int(any(verdict.is_failure for verdict in counts))


def _fails_alike(bench: Bench, trial: Trial, combination: Combination) -> bool:
    return judge(bench, combination).kind == trial.kind
