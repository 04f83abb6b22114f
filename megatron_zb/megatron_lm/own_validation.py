"""Megatron-LM's own validation of a run's arguments: a program that runs it, and what calls it.

No argument is refused for what this machine lacks: a recent GPU and a recent Transformer-Engine are
assumed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_zb.megatron_lm import own_process

# What pretrain_gpt.py gives to the validation.
_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}


@dataclass(frozen=True)
class Outcome:
    """What a validation ends with: why it refuses the arguments, if it does."""

    version: str
    refusal: str | None


def installed() -> Path | None:
    """Return the folder of a Megatron-LM that can be imported here, None if there is none."""
    found = find_spec("megatron")
    roots = (
        [] if found is None else [Path(p).parent for p in found.submodule_search_locations or ()]
    )
    return next((root for root in roots if (root / own_process.ARGUMENTS).is_file()), None)


def validate(root: Path, words: Sequence[str], world_size: int) -> Outcome:
    """Run the validation of the Megatron-LM in a folder.

    Args:
        root: a checkout, or where megatron.training is installed.
        words: the arguments of the run, with those that choose a schedule.
        world_size: the number of its ranks.

    Raises:
        UsageError: it cannot be imported here.
    """
    found = own_process.answer(
        __name__,
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


def _outcome(root: str, words: list[str]) -> Outcome:
    """Import the Megatron-LM in a folder into this process, and validate a run there."""
    sys.path.insert(0, root)
    from megatron_zb.megatron_core.cpu import run_on_cpu

    run_on_cpu(training_loop=True)
    _assume_all_is_there()
    from megatron.core.package_info import __version__
    from megatron.training import arguments  # else what cannot be imported is taken for a refusal

    importlib.reload(arguments)  # a patched checkout has hooked it
    return Outcome(__version__, _refusal(words))


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

    from megatron_zb.megatron_lm import flags
    from megatron_zb.megatron_lm.adapter_of_arguments import adapter_of, prepare_overlap
    from megatron_zb.megatron_lm.replacing import replace_static
    from megatron_zb.megatron_lm.scheduled_run import ScheduledRun

    sys.argv[1:] = words
    args = arguments.parse_args(flags.add_arguments)
    flags.translate_older(args)
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


if __name__ == "__main__":
    print("\n" + json.dumps(asdict(_outcome(sys.argv[1], json.load(sys.stdin)))))
