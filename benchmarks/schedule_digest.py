#!/usr/bin/env python3
"""One digest of many schedules, to see that a change of the code has not changed them.

Draws requests (schedule, sizes, costs, memory limit, chunks; one iteration or many without a
barrier) from a seed, builds each, and hashes its table of passes or the error it ends with. Prints
one JSON line; equal digests of two commits mean equal schedules.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import catalog, interchange

_AUTO_EVERY = 50  # requests: it searches for seconds


def draw(dice: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A name and the arguments of ``schedules.build``."""
    p, m = dice.randint(2, 8), dice.randint(1, 24)
    is_auto = number % _AUTO_EVERY == 0
    if is_auto:
        p, m = dice.randint(2, 4), dice.randint(1, 8)
    name = "auto" if is_auto else dice.choice([n for n in schedules.names() if n != "auto"])
    costs = schedules.Costs.uniform(
        pipeline_size=p,
        forward=dice.uniform(0.5, 2),
        backward=dice.uniform(0.5, 2),
        weight=dice.uniform(0.2, 2),
        p2p=dice.choice([0.0, dice.uniform(0, 0.3)]),
    )
    limit = dice.choice([None, None, dice.uniform(0.3, 2)])
    chunks = dice.choice([2, 3, 4]) if catalog.family(name).takes_chunks and not is_auto else None
    given = {"pipeline_size": p, "num_microbatches": m, "costs": costs, "memory_limit": limit}
    return name, {**given, "chunks": chunks, "back_to_back": dice.random() < 0.2}


def built(name: str, given: dict[str, Any]) -> str:
    """The schedule as a table, or what is wrong with the request."""
    try:
        return interchange.to_csv(schedules.build(name, **given))
    except UsageError as error:
        return str(error)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    dice = random.Random(arguments.seed)
    digest = hashlib.sha256()
    begin = time.process_time()
    refused = 0
    for number in range(arguments.requests):
        name, given = draw(dice, number)
        text = built(name, given)
        refused += "\n" not in text
        digest.update(text.encode())
    result = {
        "requests": arguments.requests,
        "seed": arguments.seed,
        "refused": refused,
        "digest": digest.hexdigest(),
        "seconds": time.process_time() - begin,
        **provenance.of_this_run(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
