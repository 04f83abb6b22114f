"""Megatron-LM's own parser and validation of arguments: a program that runs them, and its callers.

Importing Megatron changes the process that does, so a separate one answers, on a CPU. No argument
is refused for what this machine lacks: a recent GPU and a recent Transformer-Engine are assumed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_zb.children import ending_with_this
from megatron_zb.errors import UsageError

_FILE = Path("megatron/training/arguments.py")
_PARSER, _VALIDATION = "parser", "validation"

_ACTIONS = {
    "_StoreTrueAction": "true",
    "_StoreFalseAction": "false",
    "BooleanOptionalAction": "switch",
}
_LISTS = {None: "", "+": " ...", "*": " ..."}
_PLAIN = (str, int, float, bool, list, type(None))
# What pretrain_gpt.py gives to the validation.
_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@dataclass(frozen=True)
class OwnParser:
    """Arguments of Megatron-LM's own parser."""

    version: str
    """Its series, such as ``0.19``."""
    rows: list[list[str]]
    """Name, flags, kind of values and default of each argument, as ``arguments.csv`` has them."""
    new: list[str]
    """The flags of those that no version has that is known here."""


@dataclass(frozen=True)
class Outcome:
    """Result of a validation: the reason to refuse the arguments, if any."""

    version: str
    refusal: str | None


def installed() -> Path | None:
    """Return the folder of a Megatron-LM that can be imported here, None if there is none."""
    found = find_spec("megatron")
    roots = (
        [] if found is None else [Path(p).parent for p in found.submodule_search_locations or ()]
    )
    return next((root for root in roots if (root / _FILE).is_file()), None)


def read_parser(root: Path) -> OwnParser:
    """Read the parser of a checkout.

    Raises:
        UsageError: it cannot be imported here.
    """
    failed = f"the arguments of the Megatron-LM in '{root}' cannot be read"
    return OwnParser(**_answer(_PARSER, root, failed))


def validate(root: Path, words: Sequence[str], world_size: int) -> Outcome:
    """Run the validation of the Megatron-LM in a folder.

    Args:
        root: a checkout, or where megatron.training is installed.
        words: the arguments of the run, with those that choose a schedule.
        world_size: the number of its ranks.

    Raises:
        UsageError: it cannot be imported here.
    """
    found = _answer(
        _VALIDATION,
        root,
        f"the validation of the Megatron-LM in '{root}' cannot be run",
        given=json.dumps(list(words)),
        environment={
            "RANK": "0",
            "WORLD_SIZE": str(world_size),
            "CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        },
    )
    return Outcome(**found)


def _answer(
    question: str,
    root: Path,
    failed: str,
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run this file as a program on a folder; return the JSON that it prints last.

    Args:
        root: a checkout, or where ``megatron.training`` is installed.
        failed: the start of the sentence that says what was not possible.
        given: its standard input.
        environment: more variables of its environment.

    Raises:
        UsageError: there is no Megatron-LM, or it cannot be imported here.
    """
    if not (root / _FILE).is_file():
        raise UsageError(f"{failed}: it has no {_FILE}")
    done = run_apart(question, str(root.resolve()), given, environment or {})
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise UsageError(f"{failed}: {why}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_apart(
    question: str, root: str, given: str, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run this file as a program in a new interpreter."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", __name__, question, root],
        env={**os.environ, **path, **environment},
        input=given,
        capture_output=True,
        text=True,
        preexec_fn=ending_with_this(),
    )


# --- the program


def _parser() -> OwnParser:
    """Describe the parser of the Megatron-LM in this process."""
    from megatron.training import arguments

    from megatron_zb.megatron_core.versions import core_series
    from megatron_zb.megatron_lm.argument_table import new_arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
    actions = [action for action in parser._actions if action.dest != "help"]
    new = new_arguments(parser)
    return OwnParser(
        ".".join(map(str, core_series())),
        [_row(action) for action in actions],
        [action.option_strings[0] for action in actions if action.dest in new],
    )


def _row(action: Any) -> list[str]:
    values = _ACTIONS.get(type(action).__name__)
    if values is None:
        word = {int: "number", float: "real"}.get(action.type, "text")
        values = word + _LISTS.get(action.nargs, " ...")
    default = action.default if isinstance(action.default, _PLAIN) else None
    return [action.dest, " ".join(action.option_strings), values, json.dumps(default)]


def _outcome() -> Outcome:
    """Validate a run by the Megatron-LM in this process."""
    from megatron.core.package_info import __version__

    return Outcome(__version__, _refusal(json.load(sys.stdin)))


def _assume_all_is_there() -> None:
    import torch
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(major=9, minor=0)
    if find_spec("transformer_engine") is None:
        utils._te_version = Version("99")
        places = (transformer_engine, rope_utils, moe_utils)
        for name in {n for place in places for n in vars(place) if n.startswith("fused_")}:
            for place in places:
                if getattr(place, name, None) is None:
                    setattr(place, name, _of_transformer_engine)


def _of_transformer_engine(*_: Any) -> None:
    """Stand for a fused function, of which a validation asks only whether it is there."""


def _refusal(words: list[str]) -> str | None:
    """Return why the validation ends, None if all is valid."""
    printed = StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(printed):
            _validate(words)
    except SystemExit:
        lines = printed.getvalue().strip().splitlines()
        return lines[-1] if lines else "it ends without a reason"
    except Exception as error:
        return _sentence(error)
    return None


def _validate(words: list[str]) -> None:
    """Validate arguments as the start of the job does."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )
    from megatron.training import arguments

    from megatron_zb.job import settings
    from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of, prepare_overlap
    from megatron_zb.megatron_lm.hooks import ScheduledRun
    from megatron_zb.megatron_lm.replacing import replace_static

    sys.argv[1:] = words
    args = arguments.parse_args(settings.add_megatron_lm_arguments)
    settings.translate_older(args)
    adapter = adapter_of(args)
    prepare_overlap(args)
    layout_from_str = ScheduledRun(adapter, _NOBODY, args).layout_from_str
    replace_static(PipelineParallelLayerLayout, "from_str", layout_from_str)
    arguments.validate_args(args, _DEFAULTS)
    arguments.core_transformer_config_from_args(args)


_NOBODY: Any = None
"""There are no other ranks to meet."""


def _sentence(error: Exception) -> str:
    """Return the text of an error in one line; an assertion without one is quoted."""
    text = " ".join(str(error).split())
    if text:
        return text
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.line} ({Path(last.filename).name}, line {last.lineno})"


def main(question: str, root: str) -> None:
    """Import the Megatron-LM in a folder into this process, and print the answer."""
    sys.path.insert(0, root)
    from megatron_zb.cpu_ranks import run_on_cpu

    run_on_cpu(training_loop=True)
    if question == _VALIDATION:
        _assume_all_is_there()
    from megatron.training import arguments  # else what cannot be imported is taken for a refusal

    importlib.reload(arguments)  # a patched checkout has hooked it
    answers: dict[str, Callable[[], OwnParser | Outcome]] = {
        _PARSER: _parser,
        _VALIDATION: _outcome,
    }
    print("\n" + json.dumps(asdict(answers[question]())))


if __name__ == "__main__":
    main(*sys.argv[1:])
