"""Check of the environment: installed packages, their versions, and advice on what is missing.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_lm.checkout import Checkout, checkout_at

State = Literal["ok", "missing", "optional", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of checking one part, with one sentence on its purpose or on what to do."""

    part: str
    found: str
    state: State
    advice: str
    install: str = ""
    """Argument of pip install that fixes it; empty where pip cannot."""
    again: bool = False
    """Whether pip must reinstall a package that is already installed."""
    commands: tuple[str, ...] = ()
    """Commands to run, ready to paste."""

    @property
    def stops(self) -> bool:
        """Whether training cannot start until it is fixed."""
        return self.state in ("missing", "wrong")


def examine(root: Path | None = None) -> list[Finding]:
    """Return all findings about this environment, and about a Megatron-LM checkout if given.

    Raises:
        UsageError: the folder is no Megatron-LM checkout.
    """
    checkout = None if root is None else _checkout(root)
    torch, texts = look_at_torch(), own_requirements()
    found = [about_python(sys.version_info[:2], checkout), *about_torch(torch, _torch(texts))]
    found += about_connections(torch, os.environ)
    found.append(about_core(core_version(), checkout))
    found += about_packages(texts, on_gpus=bool(torch.gpus))
    found += about_apex(look_at(_APEX).there, look_at(_FUSED).there)
    if isinstance(checkout, Finding):
        return [*found, checkout]
    if checkout is None:
        return [*found, _NO_CHECKOUT]
    known = {finding.part for finding in found}
    loop = [one for one in about_training_loop(checkout, torch) if one.part not in known]
    return [*found, *about_checkout(checkout), *loop]


# --- packages

_OWN = "megatron-zb"


@dataclass(frozen=True)
class Requirement:
    """A package: its name, its module, its purpose, and the versions that fit."""

    name: str
    module: str
    purpose: str
    versions: str = ""
    """Version specifier such as ``>=2.7,<3``; empty where any version fits."""
    without: str = ""
    """Alternative if it is not installed; empty where it is required."""
    extras: str = ""
    """Extras for pip, between the name and the versions, such as ``[pytorch]``."""

    @property
    def install(self) -> str:
        """Argument of pip install: name, extras and versions."""
        return f"{self.name}{self.extras}{self.versions}"


@dataclass(frozen=True)
class Installed:
    """Facts about a package that are known without importing it."""

    version: str | None
    there: bool
    """Whether its module can be found."""


# What is required is known from the package's own metadata; what for is told here.
_USES = {
    use.name: use
    for use in (
        Requirement("numpy", "numpy", "Megatron's data sets are read with it"),
        Requirement("packaging", "packaging", "versions are compared with it"),
        Requirement("psutil", "psutil", "Megatron writes checkpoints with it"),
        Requirement("pydantic", "pydantic", "configurations and profiles are checked with it"),
        Requirement("pyyaml", "yaml", "configurations and profiles are read with it"),
        Requirement("rich", "rich", "this table and the pictures in the terminal are made with it"),
        Requirement("torch", "torch", "everything is computed with it"),
        Requirement(
            "transformer-engine",
            "transformer_engine",
            "it has the fused layers of --transformer-impl transformer_engine, Megatron-LM's "
            "default",
            without="give --transformer-impl local",
        ),
        Requirement(
            "numba",
            "numba",
            "the search for schedules is compiled with it; have it on all ranks of a job or on "
            "none",
            without="the search for schedules looks at less; have it on all ranks of a job or on "
            "none",
        ),
        Requirement(
            "matplotlib",
            "matplotlib",
            "megatron-zb show --output writes pictures with it",
            without="megatron-zb show draws in the terminal alone",
        ),
        Requirement(
            "jinja2",
            "jinja2",
            "megatron-zb plan --html and megatron-zb show --output FILE.html write pages with it",
            without="megatron-zb plan and megatron-zb show print in the terminal alone",
        ),
        # What Megatron-LM's training loop imports only for what some arguments ask for.
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
}
_SEPARATE = ("megatron-core", "torch")  # there is more to say about them
_OPTIONAL = ("fast", "plots", "te")  # extras
_ON_DEMAND = ("einops", "tensorboard", "transformers")


def required(texts: Iterable[str], extra: str = "") -> list[Requirement]:
    """Return the packages that metadata requires, without an extra or for one extra.

    Args:
        texts: as ``importlib.metadata.requires`` has them: ``numba>=0.60; extra == "fast"``.
        extra: name of the extra; empty for the packages that are always needed.
    """
    from packaging.requirements import Requirement as Parsed

    found = []
    for parsed in map(Parsed, texts):
        marker = parsed.marker
        if extra and (marker is None or marker.evaluate({"extra": ""})):
            continue
        if marker is None or marker.evaluate({"extra": extra}):
            extras = f"[{','.join(sorted(parsed.extras))}]" if parsed.extras else ""
            found.append(_with(parsed.name, str(parsed.specifier), extras))
    return found


def _with(name: str, versions: str, extras: str) -> Requirement:
    """Return the requirement of a package, with the versions and extras from metadata."""
    use = _USES.get(name) or Requirement(name, name.replace("-", "_"), "megatron_zb needs it")
    return replace(use, versions=versions, extras=extras)


def own_requirements() -> Sequence[str]:
    """Return what this package requires; nothing where it is not installed or damaged."""
    try:
        return metadata.requires(_OWN) or ()
    except Exception:
        return ()


def _torch(texts: Sequence[str]) -> Requirement:
    """Return the requirement of torch, with its versions where they are known."""
    try:
        return next(r for r in required(texts) if r.name == "torch")
    except (ImportError, StopIteration):
        return _USES["torch"]


def about_packages(texts: Sequence[str], *, on_gpus: bool) -> list[Finding]:
    """Return a finding for each required package and for each optional one."""
    if not look_at(_USES["packaging"]).there:
        return [about_package(_USES["packaging"], Installed(None, False))]
    if not texts:
        advice = "install it, so that it is known what it needs: run pip install . in its folder."
        return [Finding(_OWN, "not installed", "optional", advice)]
    wanted = [*required(texts), *(r for extra in _OPTIONAL for r in required(texts, extra))]
    found = []
    for requirement in wanted:
        if requirement.name in _SEPARATE:
            continue
        finding = about_package(requirement, look_at(requirement))
        needs_gpus = requirement.module == "transformer_engine"
        found.append(replace(finding, install="") if needs_gpus and not on_gpus else finding)
    return found


_APEX = Requirement("apex", "apex", "")
_FUSED = Requirement("apex", "fused_weight_gradient_mlp_cuda", "")


def look_at(requirement: Requirement) -> Installed:
    """Look up a package without importing it.

    Metadata may be damaged in many ways, so that no error is raised.
    """
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
    """Check whether a package is installed in a version that fits."""
    problem, again = _problem_with(requirement, installed)
    if not problem:
        return Finding(
            requirement.name, installed.version or "yes", "ok", f"{requirement.purpose}."
        )
    action = f"run pip install {_FORCED if again else ''}{shlex.quote(requirement.install)}"
    state: State = "missing" if problem == _NOTHING else "wrong"
    advice = f"{action}: {requirement.purpose}."
    if requirement.without:
        state, advice = "optional", f"{action}; without it, {requirement.without}."
    return Finding(requirement.name, problem, state, advice, requirement.install, again)


_NOTHING = "not installed"
_FORCED = "--force-reinstall "


def _problem_with(requirement: Requirement, installed: Installed) -> tuple[str, bool]:
    """Return the problem with a package, empty if none, and whether to reinstall it."""
    if installed.there:
        fits = _fits(installed.version, requirement.versions)
        return ("" if fits else f"{installed.version}, but {requirement.versions} is needed"), False
    if installed.version is None:
        return _NOTHING, False
    return f"{installed.version}, but broken: it has no module {requirement.module}", True


def _fits(version: str | None, versions: str) -> bool:
    """Return whether a version is one of those asked for; True for an unknown version."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        release = Version(version or "").base_version
        return SpecifierSet(versions).contains(release)
    except (ImportError, ValueError):
        return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version: (2, 13, 0) for 2.13.0+cpu."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def about_apex(has_apex: bool, has_fused: bool) -> Iterator[Finding]:
    """Check for apex and for its kernel that adds up weight gradients.

    Apex is built from source, with or without that kernel.
    """
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
    """Check whether the version of Python fits this package and the checkout."""
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
        installed = look_at(_USES["torch"]).version
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


def about_torch(torch: Torch, requirement: Requirement = _USES["torch"]) -> Iterator[Finding]:
    """Check torch, the GPUs that it sees, and the libraries that its ranks communicate with."""
    finding = about_package(requirement, Installed(torch.version, torch.version is not None))
    if finding.stops:
        yield finding
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
    """Check that CUDA_DEVICE_MAX_CONNECTIONS is 1.

    Megatron-LM refuses tensor and context parallelism without it, up to Hopper.
    """
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
    part, install = "megatron-core", "megatron-core>=0.16,<0.17"
    remedy = f"run pip install {shlex.quote(install)}"
    if version and versions.is_supported(_numbers(version)):
        return Finding(part, version, "ok", f"{versions.SUPPORTED} are served.")
    found = version or _NOTHING
    if isinstance(checkout, Checkout):
        advice = f"{remedy} to train without the checkout, which has its own."
        return Finding(part, found, "optional", advice)
    state: State = "wrong" if version else "missing"
    return Finding(part, found, state, f"{remedy}: {versions.SUPPORTED} are served.", install)


_PART = "Megatron-LM"
_NO_CHECKOUT = Finding(
    _PART,
    "not looked at",
    "optional",
    "name a checkout to have it looked at, too: megatron-zb doctor path/to/Megatron-LM.",
)
_MARK = "megatron_zb.install()"


def _checkout(root: Path) -> Checkout | Finding:
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
    yield Finding(_PART, checkout.version_text, "ok", f"{versions.SUPPORTED} are served.")
    try:
        text = (checkout.root / "megatron/training/__init__.py").read_text(encoding="utf-8")
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
    for name in _ON_DEMAND:
        yield about_package(_USES[name], look_at(_USES[name]))
    yield about_helpers(is_compiled(checkout), missing_to_compile(), bool(torch.gpus))


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


# --- printing

_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red", "wrong": "red"}


def print_findings(findings: Sequence[Finding]) -> None:
    """Print a table of the findings, advice below it, a one-line summary, and one command."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except Exception:  # it is a finding itself
        for finding in findings:
            print(f"{finding.part}: {finding.found} ({finding.state}): {finding.advice}")
    else:
        table = Table(box=None, pad_edge=False)
        for title in ("part", "found", "state", "what it is for"):
            table.add_column(title, no_wrap=title in ("part", "state"))
        for finding in findings:
            state = Text(finding.state, style=_COLOURS[finding.state])
            words = finding.advice if finding.state == "ok" else "see below"
            table.add_row(Text(finding.part), Text(finding.found), state, Text(words))
        Console().print(table)
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


def mending_command(findings: Sequence[Finding]) -> str:
    """Return a shell command that installs all that pip can fix; empty if there is nothing."""
    pip = f"{shlex.quote(sys.executable)} -m pip install "
    parts = []
    for again in (False, True):
        wanted = dict.fromkeys(f.install for f in findings if f.install and f.again is again)
        if wanted:
            parts.append(pip + (_FORCED if again else "") + shlex.join(wanted))
    return " && ".join(parts)


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line, which says whether training can start."""
    stopping = [finding.part for finding in findings if finding.stops]
    if not stopping:
        return "All that is required is here."
    return f"To be mended before training can start: {', '.join(stopping)}."


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 if anything required is missing or wrong, else 0."""
    return int(any(finding.stops for finding in findings))
