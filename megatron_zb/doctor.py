"""What is installed here, what fits, and what to do about each thing that is missing.

Nothing is imported but torch, and that may fail: a broken package is a finding. All else is read
from the metadata of packages and from the files of a checkout.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_zb.errors import UsageError
from megatron_zb.megatron import versions
from megatron_zb.megatron_lm.checkout import Checkout, checkout_at

State = Literal["ok", "missing", "optional", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One part: what was found, and in one sentence what it is for or what to do."""

    part: str
    found: str
    state: State
    advice: str

    @property
    def stops(self) -> bool:
        """Whether nothing can be trained until it is mended."""
        return self.state in ("missing", "wrong")


def examine(root: Path | None = None) -> list[Finding]:
    """Every finding about this environment, and about a Megatron-LM checkout if there is one.

    Raises:
        UsageError: the folder is no Megatron-LM checkout.
    """
    checkout = None if root is None else _checkout(root)
    torch = look_at_torch()
    found = [about_python(sys.version_info[:2], checkout), *about_torch(torch)]
    found += about_connections(torch, os.environ)
    found.append(about_core(core_version(), checkout))
    found += [about_package(requirement, look_at(requirement)) for requirement in _REQUIREMENTS]
    found += about_apex(look_at(_APEX).there, look_at(_FUSED).there)
    if isinstance(checkout, Finding):
        return [*found, checkout]
    if checkout is None:
        return [*found, _NO_CHECKOUT]
    return [*found, *about_checkout(checkout), *about_training_loop(checkout, torch)]


# --- packages


@dataclass(frozen=True)
class Requirement:
    """A package: its name, its module, the least version, and what it is for."""

    name: str
    module: str
    purpose: str
    least: str = ""
    without: str = ""
    """What to do without it; empty where it is required."""
    install: str = ""
    """What pip is to be given, if it is not the name."""

    @property
    def command(self) -> str:
        return f"pip install {shlex.quote(self.install or self._at_least)}"

    @property
    def _at_least(self) -> str:
        return f"{self.name}>={self.least}" if self.least else self.name


@dataclass(frozen=True)
class Installed:
    """What is known of a package without importing it."""

    version: str | None
    there: bool
    """Whether its module can be found."""


_OLDEST_TE = ".".join(map(str, versions.OLDEST_TRANSFORMER_ENGINE))

_REQUIREMENTS = (
    Requirement("numpy", "numpy", "Megatron's data sets are read with it", "1.26"),
    Requirement("psutil", "psutil", "Megatron writes checkpoints with it", "5.9"),
    Requirement(
        "rich", "rich", "this table and the pictures in the terminal are made with it", "13.0"
    ),
    Requirement(
        "transformer-engine",
        "transformer_engine",
        "it has the fused layers of --transformer-impl transformer_engine, Megatron-LM's default",
        _OLDEST_TE,
        "give --transformer-impl local",
        f"transformer-engine[pytorch]>={_OLDEST_TE}",
    ),
    Requirement(
        "numba",
        "numba",
        "the search for schedules is compiled with it; have it on all ranks of a job or on none",
        "0.60",
        "the search for schedules looks at less; have it on all ranks of a job or on none",
    ),
    Requirement(
        "matplotlib",
        "matplotlib",
        "megatron-zb show --output writes pictures with it",
        "3.8",
        "megatron-zb show draws in the terminal alone",
    ),
    Requirement(
        "jinja2",
        "jinja2",
        "megatron-zb plan --html and megatron-zb show --output FILE.html write pages with it",
        "3.1",
        "megatron-zb plan and megatron-zb show print in the terminal alone",
    ),
)

_APEX = Requirement("apex", "apex", "")
_FUSED = Requirement("apex", "fused_weight_gradient_mlp_cuda", "")

# What Megatron-LM's training loop imports only for what some arguments ask for.
_ON_DEMAND = (
    Requirement(
        "einops",
        "einops",
        "--hierarchical-context-parallel-sizes uses it",
        without="leave out --hierarchical-context-parallel-sizes",
    ),
    Requirement(
        "tensorboard",
        "tensorboard",
        "--tensorboard-dir writes its log with it",
        without="leave out --tensorboard-dir",
    ),
    Requirement(
        "transformers",
        "transformers",
        "--tokenizer-type HuggingFaceTokenizer reads tokenizers with it",
        without="use another tokenizer than --tokenizer-type HuggingFaceTokenizer",
    ),
)


def look_at(requirement: Requirement) -> Installed:
    """What metadata tells of a package; it may be damaged in many ways, so nothing is raised."""
    try:
        version = metadata.version(requirement.name)
    except Exception:
        version = None
    try:
        there = find_spec(requirement.module) is not None
    except Exception:
        there = False
    return Installed(version, there)


def about_package(requirement: Requirement, installed: Installed) -> Finding:
    """Whether a package is there in a version that fits."""
    problem, action = _problem_with(requirement, installed)
    if not problem:
        return Finding(
            requirement.name, installed.version or "yes", "ok", f"{requirement.purpose}."
        )
    if requirement.without:
        advice = f"{action}; without it, {requirement.without}."
        return Finding(requirement.name, problem, "optional", advice)
    state: State = "missing" if problem == _NOTHING else "wrong"
    return Finding(requirement.name, problem, state, f"{action}: {requirement.purpose}.")


_NOTHING = "not installed"


def _problem_with(requirement: Requirement, installed: Installed) -> tuple[str, str]:
    """What is wrong with an installed package, and the remedy; empty where nothing is."""
    if installed.there and _is_least(installed.version, requirement.least):
        return "", ""
    if installed.there:
        return f"{installed.version}, too old", f"run {requirement.command}"
    if installed.version is None:
        return _NOTHING, f"run {requirement.command}"
    reinstall = f"run pip install --force-reinstall {requirement.name}"
    return f"{installed.version}, but broken: it has no module {requirement.module}", reinstall


def _is_least(version: str | None, least: str) -> bool:
    """Whether a version is as new as asked; an unknown version gets the benefit of the doubt."""
    return version is None or not least or _numbers(version) >= _numbers(least)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (2, 13, 0) of 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def about_apex(has_apex: bool, has_fused: bool) -> Iterator[Finding]:
    """Apex is built from source, with or without the kernel that adds up weight gradients."""
    source = "build it from https://github.com/NVIDIA/apex"
    yield (
        Finding("apex", "yes", "ok", "it has norm layers for --transformer-impl local.")
        if has_apex
        else Finding(
            "apex",
            _NOTHING,
            "optional",
            f"{source}; without it, --sequence-parallel needs Transformer Engine.",
        )
    )
    part = "fused_weight_gradient_mlp_cuda"
    yield (
        Finding(part, "yes", "ok", "weight gradients are added up by this kernel of apex.")
        if has_fused
        else Finding(
            part,
            _NOTHING,
            "optional",
            "build apex with --cpp_ext and --cuda_ext; without it, give Megatron-LM "
            "--no-gradient-accumulation-fusion.",
        )
    )


# --- Python, torch and its devices


def about_python(version: tuple[int, ...], checkout: Checkout | Finding | None) -> Finding:
    """Whether the version of Python fits this package and the checkout."""
    least, needed_by = (3, 10), "megatron_zb"
    if isinstance(checkout, Checkout):
        needs = versions.training_loop_needs(checkout.version).python
        if needs > least:
            least, needed_by = needs, f"Megatron-LM {checkout.version_text}"
    said = ".".join(map(str, least))
    if tuple(version) < least:
        advice = f"make an environment with Python {said} or newer: {needed_by} needs it."
        return Finding("Python", platform.python_version(), "wrong", advice)
    return Finding("Python", platform.python_version(), "ok", f"{needed_by} needs {said} or newer.")


@dataclass(frozen=True)
class Torch:
    """What torch tells of itself and of this machine."""

    version: str | None = None
    broken: str = ""
    """Why it cannot be imported."""
    driver: str = ""
    """What it complains about when it looks for GPUs."""
    cuda: str | None = None
    gpus: tuple[str, ...] = ()
    capability: int = 0
    """The major number of the first GPU's compute capability: 9 is Hopper, 10 Blackwell."""
    nccl: bool = False
    gloo: bool = False


def look_at_torch() -> Torch:
    """Import torch and ask it; whatever goes wrong is in the answer."""
    try:
        if find_spec("torch") is None:
            return Torch()
        import torch
        from torch import distributed

        version, cuda = str(torch.__version__), torch.version.cuda
        has_nccl = distributed.is_available() and distributed.is_nccl_available()
        has_gloo = distributed.is_available() and distributed.is_gloo_available()
    except Exception as error:
        installed = look_at(_TORCH).version
        return Torch(installed or "unknown version", broken=_first_line(error))
    gpus, capability, driver = _gpus()
    return Torch(version, "", driver, cuda, gpus, capability, has_nccl, has_gloo)


def _gpus() -> tuple[tuple[str, ...], int, str]:
    """Names of the GPUs, capability of the first, and why there are none, if that is known."""
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


_TORCH = Requirement("torch", "torch", "everything is computed with it", "2.6")
_ONLY_CPU = "only CPU ranks can be used, with --cpu"


def about_torch(torch: Torch) -> Iterator[Finding]:
    """torch itself, the GPUs it sees, and the libraries that its ranks talk with."""
    installed = Installed(torch.version, torch.version is not None)
    problem, action = _problem_with(_TORCH, installed)
    if problem:
        state: State = "missing" if problem == _NOTHING else "wrong"
        yield Finding("torch", problem, state, f"{action}: {_TORCH.purpose}.")
        return
    if torch.broken:
        found, advice = f"{torch.version}, but broken", "install it anew from https://pytorch.org"
        yield Finding("torch", found, "wrong", f"{advice}: importing it says '{torch.broken}'.")
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
        advice = f"mend the driver, for torch says '{torch.driver}'; until then {_ONLY_CPU}."
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
_BLACKWELL = 10


def about_connections(torch: Torch, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Megatron-LM refuses tensor and context parallelism without it, up to Hopper."""
    if not torch.gpus:
        return
    value = environment.get(_CONNECTIONS)
    found = "not set" if value is None else value
    if value == "1":
        advice = "tensor and context parallelism want it."
        yield Finding(_CONNECTIONS, found, "ok", advice)
    elif torch.capability >= _BLACKWELL:
        yield Finding(_CONNECTIONS, found, "ok", "these GPUs do not need it.")
    else:
        advice = f"export {_CONNECTIONS}=1 if you use tensor or context parallelism: it is refused "
        yield Finding(_CONNECTIONS, found, "optional", f"{advice}on these GPUs otherwise.")


# --- Megatron


def core_version() -> str | None:
    """The megatron-core that would be imported: a checkout on PYTHONPATH comes first."""
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
    """Whether megatron-core is one of those served; a checkout brings its own."""
    part, remedy = "megatron-core", "run pip install 'megatron-core>=0.16,<0.17'"
    if version and versions.is_supported(_numbers(version)):
        return Finding(part, version, "ok", f"{versions.SUPPORTED} are served.")
    found = version or _NOTHING
    if isinstance(checkout, Checkout):
        advice = f"{remedy} to train without the checkout, which has its own."
        return Finding(part, found, "optional", advice)
    state: State = "wrong" if version else "missing"
    return Finding(part, found, state, f"{remedy}: {versions.SUPPORTED} are served.")


_PART = "Megatron-LM"
_NO_CHECKOUT = Finding(
    _PART,
    "not looked at",
    "optional",
    "name a checkout to have it looked at, too: megatron-zb doctor path/to/Megatron-LM.",
)
_MARK = "megatron_zb.install()"


def _checkout(root: Path) -> Checkout | Finding:
    """The checkout in a folder; one that is not served is a finding, none at all an error."""
    try:
        return checkout_at(root)
    except UsageError as error:
        needed = ("megatron/core/package_info.py", "megatron/training/training.py")
        if all((root / file).is_file() for file in needed):
            return Finding(_PART, "not served", "wrong", f"{error}.")
        raise


def about_checkout(checkout: Checkout) -> Iterator[Finding]:
    """Its version, and how to start its scripts: patched ones as ever, others by the launcher."""
    yield Finding(_PART, checkout.version_text, "ok", f"{versions.SUPPORTED} are served.")
    try:
        text = (checkout.root / "megatron/training/__init__.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        text = ""
    script = shlex.quote(str(checkout.root / "pretrain_gpt.py"))
    if _MARK in text:
        advice = f"start it as ever: torchrun ... {script} ... --pipeline-schedule v-half."
        yield Finding("how to start", "patched", "ok", advice)
    else:
        start = f"torchrun ... -m megatron_zb.launch {script} ... --pipeline-schedule v-half"
        root = shlex.quote(str(checkout.root))
        advice = f"start it with {start}, or patch it once: scripts/apply_patches.sh {root}."
        yield Finding("how to start", "not patched", "ok", advice)


def about_training_loop(checkout: Checkout, torch: Torch) -> Iterator[Finding]:
    """What the scripts of the checkout import besides megatron-core."""
    for module, name in versions.training_loop_needs(checkout.version).packages:
        purpose = f"the training loop of Megatron-LM {checkout.version_text} imports it"
        requirement = Requirement(name, module, purpose)
        yield about_package(requirement, look_at(requirement))
    for requirement in _ON_DEMAND:
        yield about_package(requirement, look_at(requirement))
    yield about_helpers(is_compiled(checkout), missing_to_compile(), bool(torch.gpus))


def is_compiled(checkout: Checkout) -> bool:
    """Whether the data set helpers have been compiled for this version of Python."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    return (checkout.root / f"megatron/core/datasets/helpers_cpp{suffix}").is_file()


def missing_to_compile() -> list[str]:
    """What Megatron-LM compiles its data set helpers with, as far as it is not here."""
    has_pybind11 = look_at(Requirement("pybind11", "pybind11", "")).there
    has_compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "c++")))
    parts = {"pybind11": has_pybind11, "make": shutil.which("make"), "a C++ compiler": has_compiler}
    return [name for name, there in parts.items() if not there]


def about_helpers(compiled: bool, missing: list[str], on_gpus: bool) -> Finding:
    """Megatron-LM compiles them on its first start; --cpu takes those of megatron-core."""
    part = "data set helpers"
    if compiled:
        return Finding(part, "compiled", "ok", "they are ready in the checkout.")
    if not missing:
        return Finding(
            part, "not compiled", "ok", "Megatron-LM compiles them when it first starts."
        )
    advice = f"install {' and '.join(missing)}: Megatron-LM compiles them when it first starts"
    if on_gpus:
        return Finding(part, "cannot be compiled", "missing", f"{advice}.")
    advice += "; with --cpu, those of an installed megatron-core are taken."
    return Finding(part, "cannot be compiled", "optional", advice)


# --- printing

_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red", "wrong": "red"}


def print_findings(findings: list[Finding]) -> None:
    """A row for each finding, and one line that sums them up."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:  # it is a finding itself
        for finding in findings:
            print(f"{finding.part}: {finding.found} ({finding.state}): {finding.advice}")
        print(summary(findings))
        return
    table = Table("part", "found", "state", "what to know or do", box=None, pad_edge=False)
    for finding in findings:
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(Text(finding.part), Text(finding.found), state, Text(finding.advice))
    console = Console()
    console.print(table)
    console.print()
    console.print(Text(summary(findings), style="bold"))


def summary(findings: list[Finding]) -> str:
    """The last line: whether training can start."""
    stopping = [finding.part for finding in findings if finding.stops]
    if not stopping:
        return "All that is required is here."
    return f"To be mended before training can start: {', '.join(stopping)}."


def exit_code(findings: list[Finding]) -> int:
    """1 if anything required is missing or wrong."""
    return int(any(finding.stops for finding in findings))
