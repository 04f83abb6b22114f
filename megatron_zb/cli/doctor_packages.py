"""Check of installed packages by their metadata: nothing is imported."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Literal

State = Literal["ok", "missing", "optional", "wrong"]

NOT_INSTALLED = "not installed"
FORCED = "--force-reinstall "
"""Option of pip install for a package that is installed and broken."""


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


# The package's metadata list the requirements; this table has their uses.
USES = {
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
            "the search for schedules is compiled with it; the first rank of a job needs it, the "
            "others take what it finds",
            without="the search for schedules looks at less; the first rank of a job needs it",
        ),
        Requirement(
            "matplotlib",
            "matplotlib",
            "megatron-zb show --output writes pictures with it",
            without="megatron-zb show draws only in the terminal",
        ),
        Requirement(
            "jinja2",
            "jinja2",
            "megatron-zb plan --html and megatron-zb show --output FILE.html write pages with it",
            without="megatron-zb plan and megatron-zb show print only in the terminal",
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
_SEPARATE = ("megatron-core", "torch")  # they have more findings
OPTIONAL = ("fast", "plots", "te")  # extras
ON_DEMAND = ("einops", "tensorboard", "transformers")


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
    use = USES.get(name) or Requirement(name, name.replace("-", "_"), "megatron_zb needs it")
    return replace(use, versions=versions, extras=extras)


def own_requirements() -> Sequence[str]:
    """Return what this package requires; nothing where it is not installed or damaged."""
    try:
        return metadata.requires(_OWN) or ()
    except Exception:
        return ()


def own_python() -> str:
    """Return the versions of Python that this package runs on; empty where it is not installed."""
    try:
        return metadata.metadata(_OWN)["Requires-Python"] or ""
    except Exception:
        return ""


def torch_requirement(texts: Sequence[str]) -> Requirement:
    """Return the requirement of torch, with its versions where they are known."""
    try:
        return next(r for r in required(texts) if r.name == "torch")
    except (ImportError, StopIteration):
        return USES["torch"]


def about_packages(texts: Sequence[str], *, on_gpus: bool) -> list[Finding]:
    """Return a finding for each required package and for each optional one."""
    if not look_at(USES["packaging"]).there:
        return [about_package(USES["packaging"], Installed(None, False))]
    if not texts:
        advice = "install it, so that it is known what it needs: run pip install . in its folder."
        return [Finding(_OWN, "not installed", "optional", advice)]
    wanted = [*required(texts), *(r for extra in OPTIONAL for r in required(texts, extra))]
    found = []
    for requirement in wanted:
        if requirement.name in _SEPARATE:
            continue
        finding = about_package(requirement, look_at(requirement))
        needs_gpus = requirement.module == "transformer_engine"
        found.append(replace(finding, install="") if needs_gpus and not on_gpus else finding)
    return found


APEX = Requirement("apex", "apex", "")
FUSED = Requirement("apex", "fused_weight_gradient_mlp_cuda", "")


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
    action = f"run pip install {FORCED if again else ''}{shlex.quote(requirement.install)}"
    state: State = "missing" if problem == NOT_INSTALLED else "wrong"
    advice = f"{action}: {requirement.purpose}."
    if requirement.without:
        state, advice = "optional", f"{action}; without it, {requirement.without}."
    return Finding(requirement.name, problem, state, advice, requirement.install, again)


def _problem_with(requirement: Requirement, installed: Installed) -> tuple[str, bool]:
    """Return the problem with a package, empty if none, and whether to reinstall it."""
    if installed.there:
        fits = _fits(installed.version, requirement.versions)
        return ("" if fits else f"{installed.version}, but {requirement.versions} is needed"), False
    if installed.version is None:
        return NOT_INSTALLED, False
    return f"{installed.version}, but broken: it has no module {requirement.module}", True


def _fits(version: str | None, versions: str) -> bool:
    """Return whether a version is one of those requested; True for an unknown version."""
    try:
        from packaging.specifiers import SpecifierSet
        from packaging.version import Version

        release = Version(version or "").base_version
        return SpecifierSet(versions).contains(release)
    except (ImportError, ValueError):
        return True


def numbers(version: str) -> tuple[int, ...]:
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
            NOT_INSTALLED,
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
            NOT_INSTALLED,
            "optional",
            "build apex with --cpp_ext and --cuda_ext; without it, give Megatron-LM "
            "--no-gradient-accumulation-fusion.",
        )
    )
