"""Check of torch, of the GPUs that it sees, and of how its ranks communicate.

Torch is imported, which may fail: a broken package is a finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from megatron_zb.cli.doctor.finding import Finding
from megatron_zb.cli.doctor.packages import USES, Installed, Requirement, about_package, look_at


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
