#!/usr/bin/env python3
"""Digests of many schedules, to see that a change of the code has not changed them.

Draws requests from a seed, builds each, and hashes its table of passes or the error it ends with.
Prints one JSON line with a digest per kind of request; equal digests of two commits mean equal
schedules. The kinds are plain (equal stages; schedule, sizes, costs, memory limit, chunks; one
iteration or many without a barrier), and what plain requests never have: overlapped pairs,
recomputation, offload, both, vocabulary parallelism without and with the embedding, unequal stages,
unequal microbatches, and token slices: with a W for each slice, with one for each microbatch, and
of unequal lengths. Searches are cut short, so that hundreds take minutes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import provenance

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.schedules import catalog, interchange
from megatron_zb.schedules.features import pairs, recomputation, slices
from megatron_zb.schedules.features.offload import Offload
from megatron_zb.schedules.features.pairs import Communication
from megatron_zb.schedules.features.recomputation import Recomputation
from megatron_zb.schedules.features.vocabulary import Vocabulary

PLAIN = "plain"
KINDS = ("pairs", "R", "DH", "R+DH", "vocabulary", "embedding", "stages", "lengths")
SLICED = ("slices", "joined", "slice lengths")
_STATES = ("R", "DH", "R+DH")
_WITH_STATES = ["v-zb", "v-half", "v-min", "zb-1p", "zb-2p"]
_WITH_OTHERS = ["zb-1p", "v-zb", "v-half", "v-min", "dualpipe-v", "wave", "zb-h1", "interleaved"]
BRIEF = ((recomputation, "SECONDS", 1.0), (pairs, "_LEAST_SECONDS", 0.3))
"""Seconds of searches for orders of other kinds than plain ones."""
_AUTO_EVERY = 50  # requests: it searches for seconds


def draw(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    """A name and the arguments of ``schedules.build``."""
    p, m = rng.randint(2, 8), rng.randint(1, 24)
    is_auto = number % _AUTO_EVERY == 0
    if is_auto:
        p, m = rng.randint(2, 4), rng.randint(1, 8)
    name = "auto" if is_auto else rng.choice([n for n in schedules.names() if n != "auto"])
    costs = schedules.Costs.uniform(
        pipeline_size=p,
        forward=rng.uniform(0.5, 2),
        backward=rng.uniform(0.5, 2),
        weight=rng.uniform(0.2, 2),
        p2p=rng.choice([0.0, rng.uniform(0, 0.3)]),
    )
    limit = rng.choice([None, None, rng.uniform(0.3, 2)])
    chunks = rng.choice([2, 3, 4]) if catalog.family(name).takes_chunks and not is_auto else None
    given = {"pipeline_size": p, "num_microbatches": m, "costs": costs, "memory_limit": limit}
    return name, {**given, "chunks": chunks, "back_to_back": rng.random() < 0.2}


def draw_other(rng: random.Random, kind: str) -> tuple[str, dict[str, Any]]:
    """A request of a kind that is not plain."""
    p, m = rng.randint(2, 5), rng.randint(2, 10)
    layers = p * rng.choice([1, 2])

    def each(least: float, most: float) -> list[float]:
        if kind in ("stages", "lengths"):
            return [rng.uniform(least, most) for _ in range(layers)]
        return [rng.uniform(least, most)] * layers

    costs = schedules.Costs.of_slices(
        pipeline_size=p,
        forward=each(0.5, 2),
        backward=each(0.5, 2),
        weight=each(0.2, 1),
        p2p=rng.choice([0.0, 0.1]),
    )
    if kind == "pairs":
        exchange = {"forward": rng.uniform(0.1, 0.6), "backward": rng.uniform(0.1, 0.6)}
        costs = costs.having(Communication(**exchange))
    if kind in ("R", "R+DH"):
        costs = costs.having(Recomputation(kept_input=rng.uniform(0.01, 0.1)))
    if kind in ("DH", "R+DH"):
        costs = costs.having(Offload(seconds=rng.uniform(0.2, 1.0)))
    if kind in ("vocabulary", "embedding"):
        output, weight = rng.uniform(1, 3), rng.uniform(0.5, 1.5)
        lookup = 0.01 if kind == "embedding" else None
        costs = costs.having(Vocabulary(output=output, weight=weight, lookup=lookup))
    if kind == "lengths":
        costs = costs.of_lengths([rng.uniform(0.5, 2) for _ in range(m)])
    if kind in SLICED:
        return draw_slices(rng, kind, {"pipeline_size": p, "costs": costs})
    name = rng.choice(_WITH_STATES if kind in _STATES else _WITH_OTHERS)
    limit = rng.choice([None, rng.uniform(0.4, 1.2)])
    sizes = {"pipeline_size": p, "num_microbatches": m}
    return name, {**sizes, "costs": costs, "memory_limit": limit}


def draw_slices(rng: random.Random, kind: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A request of token slices, for few microbatches."""
    p = given["pipeline_size"]
    choices: dict[str, Any] = {"attention": rng.choice([0.0, 0.3, 0.6])}
    choices["joins_weight"] = kind == "joined"
    cut = slices.Slicing.equal(rng.choice([2, 4]), **choices)
    if kind == "slice lengths":
        cut = slices.Slicing((4, 2, 1, 1), **choices)
    name = rng.choice(["v-zb", "v-half", "v-min", "zb-h1"])
    limit = rng.choice([None, rng.uniform(0.4, 1.2)])
    m = rng.randint(1, p + 1)
    return name, {**given, "num_microbatches": m, "memory_limit": limit, "slices": cut}


def requests(kind: str, count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The requests of a kind."""
    rng = random.Random(seed if kind == PLAIN else f"{seed} {kind}")
    for number in range(count):
        yield draw(rng, number) if kind == PLAIN else draw_other(rng, kind)


def built(name: str, given: dict[str, Any]) -> str:
    """The schedule as a table, or what is wrong with the request."""
    try:
        return interchange.to_csv(schedules.build(name, **given))
    except UsageError as error:
        return str(error)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, metavar="N", help="plain ones")
    parser.add_argument("--others", type=int, default=25, metavar="N", help="of each other kind")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def main() -> int:
    arguments = parser().parse_args()
    digests, seconds, refused = {}, {}, {}
    kinds = (*KINDS, *SLICED)
    for kind in (PLAIN, *kinds):
        if kind != PLAIN:
            for module, name, brief in BRIEF:
                setattr(module, name, brief)
        count = arguments.requests if kind == PLAIN else arguments.others
        digest, begin, errors = hashlib.sha256(), time.process_time(), 0
        for name, given in requests(kind, count, arguments.seed):
            text = built(name, given)
            errors += "\n" not in text
            digest.update(text.encode())
        digests[kind], refused[kind] = digest.hexdigest()[:16], errors
        seconds[kind] = round(time.process_time() - begin, 1)
    result = {
        "requests": {PLAIN: arguments.requests, **dict.fromkeys(kinds, arguments.others)},
        "seed": arguments.seed,
        "refused": refused,
        "digests": digests,
        "seconds": seconds,
        **provenance.of_this_run(),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
