"""Check of the environment: packages, GPUs, how ranks communicate, and Megatron, with advice.

Torch is imported, which may fail: a broken package is a finding. Of a Megatron-LM checkout, only
the parser is run.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

from megatron_zb import files
from megatron_zb.cli.doctor_packages import (
    APEX,
    FORCED,
    FUSED,
    NOT_INSTALLED,
    ON_DEMAND,
    USES,
    Finding,
    Installed,
    Requirement,
    State,
    about_apex,
    about_package,
    about_packages,
    look_at,
    numbers,
    own_python,
    own_requirements,
    torch_requirement,
)
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.checkout import Checkout, checkout_at
from megatron_zb.tables import Column, Listing


@dataclass(frozen=True)
class Torch:
    """Version, devices and communication backends of torch on this machine."""

    version: str | None = None
    broken: str = ""
    """Error when it was imported; empty if there was none."""
    driver: str = ""
    """Warning or error when it looked for GPUs; empty if there is none."""
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    capability: int = 0
    """The major number of the first GPU's compute capability: 9 is Hopper, 10 Blackwell."""
    nccl: bool = False
    gloo: bool = False


def look_at_torch() -> Torch:
    """Import torch and read its properties; an error is returned in the result."""
    try:
        if find_spec("torch") is None:
            return Torch()
        import torch
        from torch import distributed

        version, cuda = str(torch.__version__), torch.version.cuda
        has_nccl = distributed.is_available() and distributed.is_nccl_available()
        has_gloo = distributed.is_available() and distributed.is_gloo_available()
    except Exception as error:
        installed = look_at(USES["torch"]).version
        return Torch(installed or "unknown version", broken=_first_line(error))
    gpus, capability, driver = _gpus()
    return Torch(version, "", driver, cuda, gpus, capability, has_nccl, has_gloo)


def _gpus() -> tuple[tuple[str, ...], int, str]:
    """Return the names of the GPUs, the first one's capability, and the error if there are none."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if not torch.cuda.is_available():
                return (), 0, _first_line(said[-1].message) if said else ""
            names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
            return tuple(names), torch.cuda.get_device_capability(0)[0], ""
        except Exception as error:
            return (), 0, _first_line(error)


def _first_line(error: object) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


_ONLY_CPU = "only CPU ranks can be used, with --cpu"


def about_torch(torch: Torch, requirement: Requirement = USES["torch"]) -> Iterator[Finding]:
    """Check torch, the GPUs that it sees, and the libraries that its ranks communicate with."""
    finding = about_package(requirement, Installed(torch.version, torch.version is not None))
    if finding.stops:
        yield finding
        return
    if torch.broken:
        found, advice = f"{torch.version}, but broken", "install it anew from https://pytorch.org"
        yield Finding(
            "torch", found, "wrong", f"{advice}: importing it fails with '{torch.broken}'."
        )
        return
    if torch.cuda:
        yield Finding("torch", f"{torch.version}, CUDA {torch.cuda}", "ok", "it is built for GPUs.")
    else:
        advice = f"{_ONLY_CPU}; for GPUs, install a CUDA build from https://pytorch.org."
        yield Finding("torch", f"{torch.version}, without CUDA", "optional", advice)
    yield _about_gpus(torch)
    yield from _about_backends(torch)


def _about_gpus(torch: Torch) -> Finding:
    if torch.gpus:
        names = ", ".join(dict.fromkeys(torch.gpus))
        return Finding(
            "GPUs",
            f"{len(torch.gpus)}: {names}",
            "ok",
            f"start at most {len(torch.gpus)} ranks here: --nproc-per-node {len(torch.gpus)}.",
        )
    if torch.driver:
        advice = f"mend the driver: torch reports '{torch.driver}'; until then {_ONLY_CPU}."
        return Finding("GPUs", "none usable", "wrong", advice)
    if torch.cuda:
        advice = f"{_ONLY_CPU}; where there should be some, look at nvidia-smi and at the "
        return Finding("GPUs", "none", "optional", f"{advice}variable CUDA_VISIBLE_DEVICES.")
    return Finding("GPUs", "none", "optional", f"{_ONLY_CPU}.")


def _about_backends(torch: Torch) -> Iterator[Finding]:
    if torch.nccl:
        yield Finding("NCCL", "yes", "ok", "ranks on GPUs talk through it.")
    elif torch.gpus:
        advice = "install a build of torch with NCCL: ranks on GPUs talk through it."
        yield Finding("NCCL", "not in torch", "wrong", advice)
    else:
        yield Finding("NCCL", "not in torch", "optional", f"without it {_ONLY_CPU}.")
    if torch.gloo:
        yield Finding("gloo", "yes", "ok", "ranks on CPUs talk through it.")
    else:
        advice = "install a build of torch with gloo: ranks on CPUs talk through it."
        yield Finding("gloo", "not in torch", "optional" if torch.gpus else "wrong", advice)


_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_OVERLAP = "--overlap-moe-expert-parallel-comm"
_BLACKWELL = 10


def about_connections(torch: Torch, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check CUDA_DEVICE_MAX_CONNECTIONS, for which two features want opposite values.

    Megatron-LM refuses tensor and context parallelism without 1, up to Hopper; where experts are to
    exchange beside computation, which 1 forbids, it only warns.
    """
    if not torch.gpus:
        return
    value = environment.get(_CONNECTIONS)
    found = "not set" if value is None else value
    if value == "1":
        yield Finding(_CONNECTIONS, found, "ok", "tensor and context parallelism want it.")
    elif torch.capability >= _BLACKWELL:
        yield Finding(_CONNECTIONS, found, "ok", "these GPUs do not need it.")
    else:
        advice = f"export {_CONNECTIONS}=1 if you use tensor or context parallelism: it is refused "
        yield Finding(_CONNECTIONS, found, "optional", f"{advice}on these GPUs otherwise.")
    yield _about_overlap(value, wants_one=torch.capability < _BLACKWELL)


def _about_overlap(connections: str | None, *, wants_one: bool) -> Finding:
    """Check the environment that overlapping the expert all-to-all needs."""
    if connections != "1":
        advice = (
            "it overlaps the expert all-to-all, with a schedule of several chunks per rank such as "
            "v-half, --expert-model-parallel-size 2 or more, and --bf16 or --fp16."
        )
        return Finding(_OVERLAP, "can hide", "ok", advice)
    advice = f"export {_CONNECTIONS}=32 if you use it, since it hides nothing with 1"
    if wants_one:
        advice += (
            ": with it Megatron-LM takes other values for tensor and context parallelism, too, "
            "whose own overlap suffers"
        )
    return Finding(_OVERLAP, "hides nothing", "optional", f"{advice}.")


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
        checkout: one to inspect as well, if any.
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


_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red", "wrong": "red"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of the findings, advice below it, a one-line summary, and one command."""
    try:
        from rich.console import Console
        from rich.text import Text
    except Exception:  # it is a finding itself
        for finding in findings:
            print(f"{finding.part}: {finding.found} ({finding.state}): {finding.advice}")
    else:

        def coloured(state: State) -> Text:
            return Text(state, style=_COLOURS[state])

        columns: Sequence[Column[Finding]] = (
            Column("part", lambda it: it.part, is_text=True, no_wrap=True),
            Column("found", lambda it: it.found, is_text=True),
            Column("state", lambda it: it.state, coloured, is_text=True, no_wrap=True),
            Column(
                "what it is for",
                lambda it: it.advice if it.state == "ok" else "see below",
                is_text=True,
            ),
        )
        Console().print(Listing(columns, findings).table(wide=True))
        for finding in findings:
            if finding.state != "ok":
                print(f"\n{finding.part}: {finding.advice}", end="")
        print()
    for finding in findings:
        if finding.commands:
            print("\n".join([f"\n{finding.part}:", *(f"  {line}" for line in finding.commands)]))
    print(f"\n{summary(findings)}")
    if command := mending_command(findings):
        print(f"What pip can mend, all of it:\n  {command}")


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Return the findings for other programs."""
    return {
        "ready": not any(finding.stops for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "command": mending_command(findings),
    }


def mending_command(findings: Sequence[Finding]) -> str:
    """Return a shell command that installs all that pip can fix; empty if there is nothing."""
    pip = f"{shlex.quote(sys.executable)} -m pip install "
    parts = []
    for again in (False, True):
        wanted = dict.fromkeys(f.install for f in findings if f.install and f.again is again)
        if wanted:
            parts.append(pip + (FORCED if again else "") + shlex.join(wanted))
    return " && ".join(parts)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line, with the verdict whether training can start."""
    stopping = [finding.part for finding in findings if finding.stops]
    if not stopping:
        return "All that is required is here."
    return f"To be mended before training can start: {', '.join(stopping)}."


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything required is missing or wrong, else 0."""
    return int(any(finding.stops for finding in findings))
