"""Megatron's paged stash on the CPU, over stand-ins for its two Triton kernels.

The manager, its tensors and pages are Megatron's own. What stands in: the kernels, which copy
tokens to pages and back, in plain torch; and the marks by which Transformer-Engine's fused kernels
say what to stash, here all that grouped experts save but their weights. A page that has been given
back is filled with NaN, so that whoever still reads it is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch


class _Kernel:
    """A kernel of Triton's, which is launched as ``kernel[grid](...)``."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._run


def _pages(tokens: torch.Tensor, page: int) -> int:
    return -(-int(tokens) // page)


def _copy(
    source: torch.Tensor,
    on_gpu: torch.Tensor,
    on_host: torch.Tensor,
    tokens: torch.Tensor,
    free_on_gpu: torch.Tensor,
    free_on_host: torch.Tensor,
    heads: torch.Tensor,
    tails: torch.Tensor,
    capacities: torch.Tensor,
    record: torch.Tensor,
    overflow: torch.Tensor,
    host_spill: torch.Tensor,
    spilled: torch.Tensor,
    new_heads: torch.Tensor,
    *,
    PAGE_SIZE: int,
    HIDDEN_SIZE: int,
    HAS_HOST_BUFFER: int,
    **_sizes: int,
) -> None:
    """Stash the tokens of a tensor on free pages of the GPU, or of the host if those run out."""
    new_heads.copy_(heads)
    needed = _pages(tokens, PAGE_SIZE)
    places = [0, 1] if HAS_HOST_BUFFER else [0]
    place = next((i for i in places if int(tails[i] - heads[i]) >= needed), None)
    if int(overflow) or place is None:
        overflow.fill_(1)
        return
    spilled.fill_(place)
    if place:
        host_spill.fill_(1)
    free_list, pages = (free_on_host, on_host) if place else (free_on_gpu, on_gpu)
    slots = (int(heads[place]) + torch.arange(needed)) % int(capacities[place])
    record[:needed] = free_list[slots]
    rows = source.view(-1, HIDDEN_SIZE)[: int(tokens)]
    for i, part in enumerate(rows.split(PAGE_SIZE)):
        start = int(record[i]) * PAGE_SIZE
        pages[start : start + len(part)] = part
    new_heads[place] += needed


def _pop(
    on_gpu: torch.Tensor,
    on_host: torch.Tensor,
    target: torch.Tensor,
    tokens: torch.Tensor,
    record: torch.Tensor,
    spilled: torch.Tensor,
    overflow: torch.Tensor,
    free_on_gpu: torch.Tensor,
    free_on_host: torch.Tensor,
    tails: torch.Tensor,
    capacities: torch.Tensor,
    new_tails: torch.Tensor,
    *,
    PAGE_SIZE: int,
    HIDDEN_SIZE: int,
    **_sizes: int,
) -> None:
    """Bring the tokens of a tensor back, and give back its pages."""
    new_tails.copy_(tails)
    if int(overflow):
        return
    place, needed = int(spilled), _pages(tokens, PAGE_SIZE)
    free_list, pages = (free_on_host, on_host) if place else (free_on_gpu, on_gpu)
    rows = target.view(-1, HIDDEN_SIZE)[: int(tokens)]
    for i, part in enumerate(rows.split(PAGE_SIZE)):
        start = int(record[i]) * PAGE_SIZE
        part.copy_(pages[start : start + len(part)])
        pages[start : start + PAGE_SIZE] = float("nan")
    slots = (int(tails[place]) + torch.arange(needed)) % int(capacities[place])
    free_list[slots] = record[:needed]
    new_tails[place] += needed


@contextmanager
def installed() -> Iterator[Counter[str]]:
    """Let the stash run on the CPU, from its first step on; yield how often each kernel has run."""
    from megatron.core.transformer.moe import paged_stash

    manager: Any = paged_stash.PagedStashManager
    launches: Counter[str] = Counter()

    def counted(name: str, run: Callable[..., None]) -> _Kernel:
        def launch(*arguments: Any, **sizes: Any) -> None:
            launches[name] += 1
            run(*arguments, **sizes)

        return _Kernel(launch)

    usual = manager.on_save_for_backward

    def save(self: Any, tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            tensor.grouped_tensor_scale_inv = False  # type: ignore[attr-defined]
        return usual(self, tensor)

    with ExitStack() as stack:
        for prefix in ("", "_"):  # which 0.18 has
            for name, run in (("copy", _copy), ("pop", _pop)):
                kernel = f"{prefix}paged_stash_{name}_kernel"
                if hasattr(paged_stash, kernel):
                    stack.enter_context(patch.object(paged_stash, kernel, counted(name, run)))
        stack.enter_context(patch.object(manager, "on_save_for_backward", save))
        manager.STASH_MGR = None
        yield launches
        manager.STASH_MGR = None
