"""``megatron-zb check`` and the start of a job refuse the same arguments."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from megatron_zb.cli.check import installed_series
from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import Rendezvous
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_lm import argument_table, checking, hooks
from megatron_zb.megatron_lm.argument_table import Argument, Verdict
from megatron_zb.schedules import catalog
from megatron_zb.schedules.schedule import Schedule

LISTS = 300
SEED = 4
# Texts that Megatron-LM's parser takes, where not every text is one.
TEXTS = {
    "cuda_graph_impl": ("none", "local", "transformer_engine"),
    "hybrid_layer_pattern": ("M*M*M*M*", "M*|M*|M*|M*"),
    "hybrid_override_pattern": ("M*M*M*M*",),
    "pipeline_model_parallel_layout": ("Et|t|t|t|t|t|t|tL", "Ett|tt|tt|ttL"),
    "ckpt_format": ("torch", "torch_dist"),
    "optimizer": ("adam", "muon"),
    "non_persistent_ckpt_type": ("global", "local"),
    "recompute_granularity": ("full", "selective"),
    "recompute_modules": ("moe", "mlp"),
    "moe_token_dispatcher_type": ("allgather", "alltoall"),
    "fp8_recipe": ("delayed", "tensorwise"),
    "rerun_mode": ("disabled", "report_stats"),
}
OURS = (
    "--pipeline-recompute auto",
    "--pipeline-offload auto",
    "--pipeline-host-limit 0.5",
    "--pipeline-vocabulary on",
    "--pipeline-vocabulary auto",
    "--pipeline-verify",
    "--pipeline-profile run.yaml",
    "--pipeline-random-streams layer",
    "--pipeline-random-streams rank",
    "--pipeline-memory-limit 0.7",
    "--pipeline-memory-limit 40GiB",
    "--pipeline-layer-layout auto",
    "--pipeline-placement zigzag",
    "--pipeline-replan-every 20",
    "--pipeline-timeout -1",
    "--enable-optimizer-post-validation",
)


class SearchBegins(Exception):
    """What is searched for instead of a schedule."""


def search(name: str, **request: Any) -> Schedule:
    raise SearchBegins


def drawn(rng: random.Random, known: list[Argument], refused: list[Argument]) -> list[str]:
    """A command line: a schedule, some of our flags, and arguments of Megatron-LM's parser."""
    words = f"--pipeline-schedule {rng.choice(catalog.names())} --num-layers {rng.choice((7, 8))}"
    words += " --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 8"
    words += " --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 128"
    chosen = words.split()
    for flag in rng.sample(OURS, rng.choice((0, 0, 1, 2))):
        chosen += flag.split()
    arguments = rng.sample(refused, rng.choice((0, 1, 1, 2))) + rng.sample(known, rng.randrange(4))
    for argument in arguments:
        if argument.flags[0] not in chosen:
            chosen += [argument.flags[0], *_values(rng, argument)]
    return chosen


def _values(rng: random.Random, argument: Argument) -> list[str]:
    kind = argument.values.split()[0]
    if kind == "text":
        return [rng.choice(TEXTS.get(argument.name, ("a-text",)))]
    return [rng.choice(("1", "2", "4"))] if kind in ("number", "real") else []


def started(words: list[str], version: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """The sentence that ends the start of a job before its search, if one does."""
    args = checking.parse(words, version)
    args.rank = 0
    given = hooks._Hooks()
    monkeypatch.setattr(given, "_build_for_all", lambda args, rendezvous: search)
    try:
        given._scheduled_run(args, Rendezvous(0, 1, 60))
    except SearchBegins:
        return None
    except UsageError as error:
        return str(error)
    raise AssertionError("a schedule was built without a search")


def checked(words: list[str], version: str) -> tuple[list[checking.Checked], str | None]:
    """What ``check`` refuses, or the sentence that it ends with."""
    args = checking.parse(words, version)
    try:
        return checking.check(args, version, build=search).of(Verdict.REFUSED), None
    except SearchBegins:
        return [], None
    except UsageError as error:
        return [], str(error)


@pytest.mark.slow
def test_both_refuse_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 300 drawn command lines, about half are refused, by dozens of rows."""
    version, rng = installed_series(), random.Random(SEED)
    known = [a for a in argument_table.arguments() if version in a.versions]
    names = {name for row in refusals.rows() for name in row.when}
    refused = [argument for argument in known if argument.name in names]
    sentences: list[str | None] = []
    for _ in range(LISTS):
        words = drawn(rng, known, refused)
        try:
            checking.parse(words, version)
        except UsageError:  # both have this parser
            sentences.append(None)
            continue
        start = started(words, version, monkeypatch)
        found, error = checked(words, version)
        sentences.append(start)
        assert (start is None) == (not found and error is None), (words, start, found, error)
        if start is not None and error is None:
            flag, why = found[0].flag, found[0].finding.why
            assert start.endswith(re.sub(r"^with .*?: ", "", why)), (words, start, flag)
        else:
            assert start == error, words
    distinct = {sentence for sentence in sentences if sentence is not None}
    assert LISTS / 4 < sum(sentence is not None for sentence in sentences) < 3 * LISTS / 4
    assert len(distinct) > 40
