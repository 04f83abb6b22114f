"""All that is checked of the environment, in the order of the table."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from megatron_zb.cli.doctor.devices import about_connections, about_torch, look_at_torch
from megatron_zb.cli.doctor.finding import Finding
from megatron_zb.cli.doctor.megatron import (
    NO_CHECKOUT,
    about_arguments,
    about_checkout,
    about_core,
    about_training_loop,
    core_version,
    read_checkout,
)
from megatron_zb.cli.doctor.packages import (
    APEX,
    FUSED,
    about_apex,
    about_packages,
    look_at,
    numbers,
    own_python,
    own_requirements,
    torch_requirement,
)
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.checkout import Checkout


def examine(root: Path | None = None) -> list[Finding]:
    """Return all findings about this environment, and about a Megatron-LM checkout if given.

    Raises:
        UsageError: the folder is no Megatron-LM checkout.
    """
    checkout = None if root is None else read_checkout(root)
    torch, texts = look_at_torch(), own_requirements()
    found = [about_python(sys.version_info[:2], own_python(), checkout)]
    found += about_torch(torch, torch_requirement(texts))
    found += about_connections(torch, os.environ)
    found.append(about_core(core_version(), checkout))
    found += about_packages(texts, on_gpus=bool(torch.gpus))
    found += about_apex(look_at(APEX).there, look_at(FUSED).there)
    if isinstance(checkout, Finding):
        return [*found, checkout]
    if checkout is None:
        return [*found, NO_CHECKOUT]
    known = {finding.part for finding in found}
    loop = [one for one in about_training_loop(checkout, torch) if one.part not in known]
    return [*found, *about_checkout(checkout), about_arguments(checkout), *loop]


def about_python(
    version: tuple[int, ...], own: str, checkout: Checkout | Finding | None
) -> Finding:
    """Check whether the version of Python fits this package and the checkout.

    Args:
        version: of Python, major and minor.
        own: versions that this package runs on, such as ``>=3.10``; empty where not known.
        checkout: one that is looked at, too, if any.
    """
    least, needed_by = numbers(own.removeprefix(">=")), "megatron_zb"
    if isinstance(checkout, Checkout):
        needs = versions.training_loop_needs(checkout.version).python
        if needs > least:
            least, needed_by = needs, f"Megatron-LM {checkout.version_text}"
    if not least:
        return Finding("Python", platform.python_version(), "ok", "everything is run by it.")
    said = ".".join(map(str, least))
    if version < least:
        advice = f"make an environment with Python {said} or newer: {needed_by} needs it."
        return Finding("Python", platform.python_version(), "wrong", advice)
    return Finding("Python", platform.python_version(), "ok", f"{needed_by} needs {said} or newer.")
