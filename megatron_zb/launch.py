"""Run a pretrain script of an unmodified Megatron-LM checkout with these schedules.

    torchrun ... -m megatron_zb.launch [--cpu] Megatron-LM/pretrain_gpt.py <Megatron arguments>

The script runs as it would by itself, as ``__main__`` and from its own folder's modules; what it
imports from Megatron has been hooked before.
"""

from __future__ import annotations

import argparse
import os
import platform
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_zb.children import end_with_launcher
from megatron_zb.errors import UsageError, describe_lost_peer, end_with, explain_missing_package

if TYPE_CHECKING:
    from megatron_zb.megatron_lm.checkout import Checkout

USAGE = """\
usage: torchrun [torchrun arguments] -m megatron_zb.launch [--cpu] SCRIPT [arguments of the script]

Runs a pretrain script of an unmodified Megatron-LM checkout; with --pipeline-schedule among its
arguments, under a schedule of megatron_zb.

  SCRIPT   a pretrain script in a Megatron-LM checkout, such as Megatron-LM/pretrain_gpt.py
  --cpu    run on CPU ranks over gloo, to debug a pipeline where there is no GPU; may stand
           anywhere among the arguments

  megatron-zb doctor Megatron-LM                         says what is installed and what is missing
  python -m megatron_zb.launch SCRIPT --help             lists these and the script's own arguments

The script gets these arguments; docs/flags.md has an example of each:
"""


def main(argv: Sequence[str]) -> None:
    """Run the script; a UsageError is printed as one sentence, with exit code 2."""
    on_cpu = "--cpu" in argv
    rest = [argument for argument in argv if argument != "--cpu"]
    if rest[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n{_flags()}", end="")
        sys.exit(0)
    end_with_launcher()
    rank = int(os.environ.get("RANK", "0"))
    try:
        with explain_missing_package():
            script = _prepare(rest, on_cpu)
            sys.argv = [str(script), *rest[1:]]
            runpy.run_path(str(script), run_name="__main__")
    except UsageError as error:
        end_with(error, rank)
    except RuntimeError as error:
        lost = describe_lost_peer(error, rank)
        if lost is None:
            raise
        print(lost, file=sys.stderr, flush=True)
        os._exit(1)  # an orderly end would wait for the rank that has ended


def _flags() -> str:
    """Return the help of the flags that a script gets."""
    from megatron_zb.job.settings import add_megatron_lm_arguments

    parser = argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS)
    return add_megatron_lm_arguments(parser).format_help().lstrip()


def _prepare(arguments: Sequence[str], on_cpu: bool) -> Path:
    """Put the checkout first on the path, and hook its training loop.

    Raises:
        UsageError: there is no such script, or it is not one of a known Megatron-LM.
    """
    from megatron_zb.megatron_core.versions import warn_of_core
    from megatron_zb.megatron_lm.checkout import checkout_of

    if not arguments:
        raise UsageError(
            "no script was named: give a pretrain script of a Megatron-LM checkout, such as "
            "Megatron-LM/pretrain_gpt.py, after the launcher's own arguments"
        )
    script = Path(arguments[0])
    checkout = checkout_of(script)
    _check_python(checkout)
    folders = dict.fromkeys([str(script.resolve().parent), str(checkout.root)])
    sys.path[:0] = folders
    prepare = None
    if on_cpu:
        from megatron_zb.cpu_ranks import prepare_arguments, run_on_cpu

        run_on_cpu(training_loop=True)
        prepare = prepare_arguments
    warn_of_core()
    from megatron_zb.megatron_lm.hooks import install

    install(prepare)
    return script


def _check_python(checkout: Checkout) -> None:
    """Reject a Python that is too old, which would fail anywhere among Megatron's imports."""
    from megatron_zb.megatron_core.versions import training_loop_needs

    least = training_loop_needs(checkout.version).python
    if sys.version_info < least:
        raise UsageError(
            f"Megatron-LM {checkout.version_text} in '{checkout.root}' needs Python "
            f"{'.'.join(map(str, least))} or newer, but this is {platform.python_version()}"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
