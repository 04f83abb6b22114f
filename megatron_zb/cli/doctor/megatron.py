"""Check of megatron-core, and of a Megatron-LM checkout, of which only the parser is run."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from megatron_zb import files
from megatron_zb.cli.doctor.devices import Torch
from megatron_zb.cli.doctor.finding import NOT_INSTALLED, Finding, State
from megatron_zb.cli.doctor.packages import (
    ON_DEMAND,
    USES,
    Requirement,
    about_package,
    look_at,
    numbers,
)
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.checkout import Checkout, checkout_at


def core_version() -> str | None:
    """Return the version of the megatron-core on the path; a checkout on PYTHONPATH comes first."""
    try:
        spec = find_spec("megatron.core")
        folders = list(spec.submodule_search_locations or ()) if spec else []
    except Exception:
        folders = []
    for folder in folders:
        try:
            return checkout_at(Path(folder).parents[1]).version_text
        except UsageError:
            continue
    version = look_at(Requirement("megatron-core", "megatron.core", "")).version
    return version if version or not folders else "unknown version"


def about_core(version: str | None, checkout: Checkout | Finding | None) -> Finding:
    """Check whether megatron-core is a supported version; a checkout brings its own."""
    part, install = "megatron-core", versions.oldest_to_install()
    remedy = f"run pip install {shlex.quote(install)}"
    with suppress(UsageError):
        return _about_version(part, version or "")
    found = version or NOT_INSTALLED
    if isinstance(checkout, Checkout):
        advice = f"{remedy} to train without the checkout, which has its own."
        return Finding(part, found, "optional", advice)
    state: State = "wrong" if version else "missing"
    return Finding(part, found, state, f"{remedy}: {versions.SUPPORTED} are served.", install)


def _about_version(part: str, version: str) -> Finding:
    """Check a version of Megatron.

    Raises:
        UsageError: it is older than all that are known.
    """
    warning = versions.warning_of(numbers(version), part)
    state: State = "optional" if warning else "ok"
    return Finding(part, version, state, f"{warning or f'{versions.SUPPORTED} are served'}.")


_PART = "Megatron-LM"
NO_CHECKOUT = Finding(
    _PART,
    "not looked at",
    "optional",
    "name a checkout to have it looked at, too: megatron-zb doctor path/to/Megatron-LM.",
)
_MARK = "megatron_zb.install()"


def read_checkout(root: Path) -> Checkout | Finding:
    """Return the checkout in a folder, or a finding if its version is not supported.

    Raises:
        UsageError: there is no checkout in the folder.
    """
    try:
        return checkout_at(root)
    except UsageError as error:
        needed = ("megatron/core/package_info.py", "megatron/training/training.py")
        if all((root / file).is_file() for file in needed):
            return Finding(_PART, "not served", "wrong", f"{error}.")
        raise


def about_checkout(checkout: Checkout) -> Iterator[Finding]:
    """Yield the version of a checkout, and how to start its scripts.

    A patched checkout starts as usual, any other with the launcher.
    """
    yield _about_version(_PART, checkout.version_text)
    try:
        text = files.read_text(checkout.root / "megatron/training/__init__.py")
    except (OSError, ValueError):
        text = ""
    script = shlex.quote(str(checkout.root / "pretrain_gpt.py"))
    if _MARK in text:
        command = f"torchrun ... {script} ... --pipeline-schedule v-half"
        yield Finding("how to start", "patched", "ok", "start it as ever.", commands=(command,))
    else:
        command = f"torchrun ... -m megatron_zb.launch {script} ... --pipeline-schedule v-half"
        patch = f"scripts/apply_patches.sh {shlex.quote(str(checkout.root))}"
        advice = "start it with the launcher (the first command), or patch it once (the second)."
        yield Finding("how to start", "not patched", "ok", advice, commands=(command, patch))


def about_training_loop(checkout: Checkout, torch: Torch) -> Iterator[Finding]:
    """Check for the packages that the checkout's scripts import besides megatron-core."""
    for module, name in versions.training_loop_needs(checkout.version).packages:
        purpose = f"the training loop of Megatron-LM {checkout.version_text} imports it"
        requirement = Requirement(name, module, purpose)
        yield about_package(requirement, look_at(requirement))
    for name in ON_DEMAND:
        yield about_package(USES[name], look_at(USES[name]))
    yield about_helpers(is_compiled(checkout), missing_to_compile(), bool(torch.gpus))


def about_arguments(checkout: Checkout) -> Finding:
    """Name the arguments of the checkout's own parser that no known version has."""
    from megatron_zb.megatron_lm.own_process import read_parser

    part = "arguments"
    try:
        new = read_parser(checkout.root).new
    except UsageError as error:
        return Finding(part, "not read", "optional", f"{error}.")
    if new:
        advice = f"whether they go with a schedule has not been looked at: {', '.join(new)}."
        return Finding(part, f"{len(new)} unknown", "optional", advice)
    return Finding(part, "all known", "ok", "megatron-zb check lists which go with a schedule.")


def is_compiled(checkout: Checkout) -> bool:
    """Return whether the data set helpers are compiled for this version of Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return (checkout.root / f"megatron/core/datasets/helpers_cpp{suffix}").is_file()


def missing_to_compile() -> list[str]:
    """Return the missing tools of those that compile Megatron-LM's data set helpers."""
    has_pybind11 = look_at(Requirement("pybind11", "pybind11", "")).there
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "c++")))
    parts = {"pybind11": has_pybind11, "make": shutil.which("make"), "a C++ compiler": has_compiler}
    return [name for name, there in parts.items() if not there]


def about_helpers(compiled: bool, missing: list[str], on_gpus: bool) -> Finding:
    """Check whether the data set helpers are compiled or can be.

    Megatron-LM compiles them on its first start; --cpu takes those of megatron-core.
    """
    part = "data set helpers"
    if compiled:
        return Finding(part, "compiled", "ok", "they are ready in the checkout.")
    if not missing:
        return Finding(
            part, "not compiled", "ok", "Megatron-LM compiles them when it first starts."
        )
    advice = f"install {' and '.join(missing)}: Megatron-LM compiles them when it first starts"
    install = "pybind11" if "pybind11" in missing else ""
    if on_gpus:
        return Finding(part, "cannot be compiled", "missing", f"{advice}.", install)
    advice += "; with --cpu, those of an installed megatron-core are taken."
    return Finding(part, "cannot be compiled", "optional", advice, install)
