#!/usr/bin/env python3
"""Write docs/flags.md: the flags of a training, from ``ScheduleSettings`` and ``refusals.yaml``.

python docs/make_flags.py
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_zb.job.settings import FLAGS, MEGATRON_LM, ScheduleSettings, parse_encoder
from megatron_zb.megatron_core import refusals
from megatron_zb.megatron_core.refusals import OVERLAP, RefusalRow
from megatron_zb.parsing import flag_of
from megatron_zb.schedules import catalog
from megatron_zb.schedules.features.slices import parse_slices
from megatron_zb.schedules.request import Limit

PAGE = Path(__file__).resolve().parent / "flags.md"
VERSION = "0.1.0"
SINCE = {"pipeline_warm_up": "0.2.0"}
"""The version that brought a flag, where it is not the first one."""

LAUNCH = "torchrun --nproc-per-node 4 -m megatron_zb.launch pretrain_gpt.py $MY_ARGUMENTS \\\n    "
CHUNKS = "num_virtual_stages_per_pipeline_rank"
POST_VALIDATION, SNAPSHOT = "enable_optimizer_post_validation", "post_validation_snapshot"
LISTED = "pipeline_schedule"
"""What excludes every schedule is in docs/support.md."""

INTRODUCTION = """\
# Flags

A training takes these flags beside Megatron-LM's own. `megatron_zb.launch` and a patched checkout
take all of them. `megatron_zb.train` takes most of them, as its `--help` lists. It is a small
trainer, and refuses arguments that only Megatron-LM's scripts have, such as `--fp16` or
`--use-distributed-optimizer`.

In the examples, `$MY_ARGUMENTS` are the arguments of your Megatron-LM run, with
`--pipeline-model-parallel-size 4`. `megatron-zb check -- $MY_ARGUMENTS --pipeline-schedule v-half`
checks a command line before you start it. A combination that is excluded ends the run before its
first step, on all ranks, with the reason that is given here.

A *share* of memory is a share of 1F1B's activation memory: `0.5` allows half of what 1F1B needs for
the same model and batch. The [glossary](glossary.md) explains further words.
"""

SECOND = """\
## Other flags that choose features of a schedule

The first two are Megatron-LM's. With a schedule they choose more than in Megatron-LM.
"""

OVERLAP_HELP = (
    "run a forward and a backward of two microbatches as one pass, so that the expert all-to-all "
    "of one runs beside the computation of the other. It is Megatron-LM's flag. With a schedule "
    "that has several chunks per rank, the schedule chooses which passes run together (default: "
    "off)"
)

NEEDS = {
    "pipeline_schedule": "`--pipeline-model-parallel-size` of 2 or more",
    "pipeline_schedule_file": "a table for the same pipeline size and number of microbatches",
    "pipeline_placement": f"`--pipeline-schedule auto` and `{flag_of(CHUNKS)}`",
    "pipeline_memory_limit": "a schedule by its name. `auto` searches within the limit; a schedule "
    "with another name is refused if no order of it keeps the limit",
    "pipeline_schedule_cache": "a schedule that is searched, such as `auto`",
    "pipeline_slices": "a GPT model with causal attention",
    "pipeline_recompute": "`auto` or a V schedule, with `--pipeline-memory-limit` where the "
    "schedule would otherwise fit",
    "pipeline_offload": "`auto` or a V schedule, with `--pipeline-memory-limit` where the "
    "schedule would otherwise fit",
    "pipeline_host_limit": "`--pipeline-offload auto`",
    "pipeline_vocabulary": "a pipeline size that divides the rows of the vocabulary "
    "(`--make-vocab-size-divisible-by`)",
    "pipeline_adapter_steps": "`--pipeline-adapters`",
    "pipeline_update_delay": "`1f1b`, `interleaved`, `zb-h1`, `v-min`, `v-half`, `v-zb` or `auto`",
    "pipeline_update_feedback": "`--pipeline-update-delay 1`",
    "pipeline_update_prediction": "`--pipeline-update-delay 1`",
    "pipeline_encoder": "a [model with an encoder](schedules.md#a-second-model-in-the-gaps)",
    "pipeline_adapters": "`--load`, and a file of [adapters](adapters.md)",
    "pipeline_timeout": "nothing",
    "pipeline_allow_other_data": "`--load`",
    CHUNKS: "`--pipeline-schedule interleaved`, `wave` or `auto`",
    OVERLAP: "several chunks per rank, `--expert-model-parallel-size` of 2 or more, and `--bf16` "
    "or `--fp16`",
    SNAPSHOT: f"`{flag_of(POST_VALIDATION)}`",
}
"""What a flag needs, where that is not simply any schedule."""

EXAMPLES = {
    "pipeline_schedule": "--pipeline-schedule v-half",
    "pipeline_schedule_file": "--pipeline-schedule-file order.csv",
    "pipeline_memory_limit": "--pipeline-schedule auto --pipeline-memory-limit 0.5",
    "pipeline_slices": "--pipeline-schedule v-half --pipeline-slices 4",
    "pipeline_layer_layout": "--pipeline-schedule v-zb --pipeline-layer-layout auto",
    "pipeline_vocabulary": "--pipeline-schedule v-zb --pipeline-vocabulary on",
    "pipeline_recompute": "--pipeline-schedule auto --pipeline-memory-limit 0.3 "
    "--pipeline-recompute auto",
    "pipeline_offload": "--pipeline-schedule auto --pipeline-memory-limit 0.3 "
    "--pipeline-offload auto",
    "pipeline_host_limit": "--pipeline-schedule v-zb --pipeline-memory-limit 0.6 "
    "--pipeline-offload auto --pipeline-host-limit 16GiB",
    "pipeline_encoder": "--pipeline-schedule v-half --pipeline-encoder 0.2",
    "pipeline_adapters": "--pipeline-schedule v-zb --load base --pipeline-adapters adapters.yaml",
    "pipeline_adapter_steps": "--pipeline-schedule v-zb --load base --pipeline-adapters "
    "adapters.yaml --pipeline-adapter-steps 4",
    "pipeline_update_delay": "--pipeline-schedule v-half --pipeline-update-delay 1",
    "pipeline_update_feedback": "--pipeline-schedule v-half --pipeline-update-delay 1 "
    "--pipeline-update-feedback on",
    "pipeline_update_prediction": "--pipeline-schedule v-half --pipeline-update-delay 1 "
    "--pipeline-update-prediction linear",
    "pipeline_profile": "--pipeline-schedule zb-h1 --pipeline-profile run.yaml",
    "pipeline_verify": "--pipeline-schedule v-half --pipeline-verify",
    "pipeline_warm_up": "--pipeline-schedule v-half --pipeline-warm-up off",
    "pipeline_placement": "--pipeline-schedule auto --pipeline-placement zigzag "
    f"{flag_of(CHUNKS)} 2",
    "pipeline_schedule_cache": "--pipeline-schedule auto --pipeline-schedule-cache schedules",
    "pipeline_replan_every": "--pipeline-schedule auto --pipeline-replan-every 1000",
    "pipeline_random_streams": "--pipeline-schedule v-half --pipeline-random-streams layer",
    "pipeline_timeout": "--pipeline-schedule v-half --pipeline-timeout 300",
    "pipeline_allow_other_data": "--pipeline-schedule v-half --load checkpoints "
    "--pipeline-allow-other-data",
    CHUNKS: f"--pipeline-schedule interleaved {flag_of(CHUNKS)} 4",
    OVERLAP: f"--pipeline-schedule v-half {flag_of(OVERLAP)} --expert-model-parallel-size 2 --bf16",
    POST_VALIDATION: f"--pipeline-schedule v-zb {flag_of(POST_VALIDATION)}",
    SNAPSHOT: f"--pipeline-schedule v-zb {flag_of(POST_VALIDATION)} {flag_of(SNAPSHOT)} host",
}
"""The arguments of an example by setting; tests/docs/test_flags.py parses and checks each."""

CONDITIONS = {
    "recompute": "pipeline_recompute",
    "offload": "pipeline_offload",
    "vocabulary": "pipeline_vocabulary",
    "layer_streams": "pipeline_random_streams",
    "post_validation": POST_VALIDATION,
    "file": "pipeline_schedule_file",
    "verify": "pipeline_verify",
    "warm_up": "pipeline_warm_up",
    "slices": "pipeline_slices",
    "adapters": "pipeline_adapters",
    "encoder": "pipeline_encoder",
    "update_delay": "pipeline_update_delay",
    "overlap": OVERLAP,
}
"""The setting that a condition of refusals.yaml is about."""

SHOWN = {
    "recompute": "`--pipeline-recompute auto`",
    "offload": "`--pipeline-offload auto`",
    "vocabulary": "`--pipeline-vocabulary on`",
    "warm_up": "`--pipeline-warm-up on`",
    "layer_streams": "`--pipeline-random-streams layer`",
    "graphs": "CUDA graphs",
    "copies": "`weights: all` in the file of `--pipeline-adapters`",
    "any": "any schedule",
    "two_ways": "`chimera` and `bitpipe`",
    "one_chunk": "a schedule with one chunk per rank",
    "fixed_order": "a schedule with a fixed order (`gpipe`, `1f1b`, `interleaved`, `zb-h1`, "
    "`zb-h2`)",
}
KINDS = {int: "a whole number", float: "a number"}
KINDS_OF_METAVARS = {
    "FILE": "a file to write",
    "DIR": "a folder",
    "CSV": "a file to read",
    "NAME": "a name of [these](schedules.md#which-one)",
    "auto|FILE": "`auto`, or a file of `--pipeline-profile`",
}


@dataclass(frozen=True)
class Flag:
    """One flag: its setting, its values, its default and what it does."""

    name: str
    values: str
    default: str
    text: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def title(self) -> str:
        """The words of its name, whose anchor is the same on every site."""
        return self.name.removeprefix("pipeline_").replace("_", " ").capitalize()


def flags(names: list[str]) -> Iterator[Flag]:
    """Yield the flags of settings, as their parser has them."""
    known = {each.name: each for each in fields(ScheduleSettings)}
    for name in names:
        if name == OVERLAP:
            yield flag_with(name, "no value", OVERLAP_HELP)
        else:
            argument = {
                key: value[MEGATRON_LM] if isinstance(value, dict) else value
                for key, value in known[name].metadata.items()
            }
            yield flag_with(name, values(argument), argument["help"])


def flag_with(name: str, accepted: str, text: str) -> Flag:
    """Return a flag, whose default is split off the help text."""
    found = re.fullmatch(r"(.*?)(?: \(default: ([^)]*)\))?", text, re.S)
    assert found is not None
    sentence = found[1]
    for choice in re.findall(r"`(\w+)`", accepted):
        sentence = re.sub(rf"(?<!`)\b{choice}:", f"`{choice}`:", sentence)
    return Flag(name, accepted, code(found[2] or "off"), code(sentence.removesuffix(".") + "."))


def values(argument: dict[str, Any]) -> str:
    """Return which values a flag takes, by its argument for argparse."""
    if argument.get("action") == "store_true":
        return "no value"
    if "choices" in argument:
        return ", ".join(f"`{each}`" for each in argument["choices"])
    if argument.get("type") == Limit.parse:
        return "a share such as `0.5`, or bytes such as `40GiB`"
    if argument.get("type") == parse_encoder:
        return "`on`, `off`, or a share such as `0.2`"
    if argument.get("type") == parse_slices:
        return "a number, lengths such as `2,1,1`, or `auto`"
    if "type" in argument:
        return KINDS[argument["type"]]
    return KINDS_OF_METAVARS[argument["metavar"]]


def code(text: str) -> str:
    """Return a text with its flags and its names of schedules marked as code."""
    schedules = "|".join(map(re.escape, sorted(catalog.all_names(), key=len, reverse=True)))
    plain = rf"`[^`]*`|--[a-z0-9][\w-]*|(?<![\w-])(?:{schedules})(?![\w-])"
    return re.sub(plain, lambda hit: hit[0] if hit[0].startswith("`") else f"`{hit[0]}`", text)


def excluded(name: str) -> dict[str, list[str]]:
    """Return what a flag excludes by the reason."""
    found: dict[str, list[str]] = {}
    for row in refusals.rows():
        if refusals.START in row.stage:
            for other, why in _pairs(row, name):
                others = found.setdefault(why, [])
                others += [] if other in others else [other]
    return found


def _pairs(row: RefusalRow, name: str) -> Iterator[tuple[str, str]]:
    """Yield the other sides of a conflict with a flag, and the reasons."""
    if row.says and row.unless:
        return  # a flag that needs another one, as NEEDS has it
    more = [_shown(other, test) for other, test in row.if_any.items() if other != name]
    if name in row.when:
        for condition in row.with_:
            if condition == "any" and more:
                yield from ((other, row.why) for other in more)
            else:
                yield _together(_condition(condition), more), _reason(row, name, condition)
    for condition in row.with_:
        if CONDITIONS.get(condition) == name:
            for other, test in row.when.items():
                yield _together(_shown(other, test), more), _reason(row, other, condition)


def _together(name: str, more: list[str]) -> str:
    return f"{name} with {' or '.join(more)}" if more else name


def _reason(row: RefusalRow, name: str, condition: str) -> str:
    """Return why, by the sentence of a row that has one."""
    if not row.says:
        return code(row.why)
    other = flag_of(CONDITIONS[condition])
    return code(row.says.format(flag=flag_of(name), other=other).partition(": leave")[0])


def _condition(name: str) -> str:
    return SHOWN.get(name) or f"`{flag_of(CONDITIONS.get(name, name))}`"


def _shown(name: str, test: dict[str, Any]) -> str:
    """Return an argument with the values that are refused."""
    if name == "precision":
        return "neither `--bf16` nor `--fp16`"
    flag = "CUDA graphs" if name == "graphs" else f"`{refusals.said_flag(name)}`"
    kind: str
    wanted: Any
    kind, wanted = next(iter(test.items()))
    if kind == "is" and isinstance(wanted, str):
        return f"{flag} of kind `{wanted}`" if name == "graphs" else f"{flag[:-1]} {wanted}`"
    if kind == "not" and not {"none", "disabled"} & set(map(str, wanted)):
        plain = [each for each in wanted if isinstance(each, str)]
        return f"{flag} other than {' and '.join(f'`{each}`' for each in plain)}"
    if kind == "contains":
        return f"{flag} with `{wanted}`"
    if kind in ("above", "below") and not isinstance(wanted, list):
        return f"{flag} {kind} {wanted}"
    return flag


def section(flag: Flag) -> Iterator[str]:
    """Yield the lines about one flag."""
    yield f"## {flag.title}\n"
    yield from wrapped(f"`{flag.flag}`: {flag.text}")
    yield ""
    yield from wrapped(f"- **Values:** {flag.values}.", "  ")
    yield from wrapped(f"- **Default:** {flag.default}.", "  ")
    named = any("`--pipeline-schedule-file`" in others for others in excluded(flag.name).values())
    by = "its name" if named else "its name or from a file"
    needs = NEEDS.get(flag.name, f"a schedule, by {by}")
    yield from wrapped(f"- **Needs:** {needs}.", "  ")
    yield from excludes(flag.name)
    yield f"- **Since:** {SINCE.get(flag.name, VERSION)}.\n"
    yield f"```\n{LAUNCH}{EXAMPLES[flag.name]}\n```\n"


def excludes(name: str) -> Iterator[str]:
    """Yield the item of what a flag excludes."""
    found = excluded(name)
    if name == LISTED:
        yield from wrapped(
            "- **Excludes:** `--pipeline-schedule-file`, and what [support](support.md#refused) "
            "lists for any schedule.",
            "  ",
        )
    elif not found:
        yield "- **Excludes:** nothing."
    else:
        yield "- **Excludes:**"
        for why, others in found.items():
            yield from wrapped(f"    - {', '.join(others)}: {why}.", "      ")


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a text."""
    return textwrap.wrap(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def table(found: list[Flag]) -> Iterator[str]:
    """Yield the lines of a table of flags."""
    yield "| flag | values | default | since |"
    yield "|---|---|---|---|"
    for flag in found:
        anchor = flag.title.lower().replace(" ", "-")
        since = SINCE.get(flag.name, VERSION)
        yield f"| [`{flag.flag}`](#{anchor}) | {flag.values} | {flag.default} | {since} |"
    yield ""


def page() -> str:
    """Return the whole page."""
    names = [name for name in FLAGS[MEGATRON_LM] if name.startswith("pipeline_")]
    first = list(flags(names))
    second = list(flags([CHUNKS, OVERLAP, POST_VALIDATION, SNAPSHOT]))
    lines = [INTRODUCTION, *table(first)]
    for flag in first:
        lines += section(flag)
    lines += [SECOND, *table(second)]
    for flag in second:
        lines += section(flag)
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
