#!/usr/bin/env python3
"""What does a receive that waits for its message do to a matrix product beside it?

With several GPUs, rank 0 posts receives over NCCL, with the options of the channels between
pipeline ranks and with NCCL's own, and multiplies matrices while nobody has sent. With one GPU,
kernels that spin, each on a stream, stand in for receives; each occupies less of a multiprocessor
than NCCL's thread blocks do. On a CPU the receives go over gloo. Also measures what torch's
allocator really takes for pinned memory of a size that is no power of two.

Prints one JSON line: the milliseconds of a product by the number of receives beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import one_device
import torch
import torch.distributed as dist

from megatron_zb.runtime.channels import GroupOptions

COUNTS = (0, 1, 2, 4)
SPINNING_MS = 2000.0
SECONDS = 50
OPTIONS = {"channels": GroupOptions(), "NCCL's own": GroupOptions(nccl={})}


def main() -> None:
    args = _arguments()
    device = one_device.choose(args.device)
    if args.rank is not None:
        _rank(args.rank, Path(args.meeting), device)
        return
    line: dict[str, Any] = {
        "benchmark": "waiting_receive",
        "machine": one_device.describe(device),
        "size": _size(device),
    }
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        line |= {"receives": "stand-ins that spin", "product_ms": {"stand-ins": _spinning(device)}}
    else:
        line |= {"receives": "gloo" if device.type == "cpu" else "NCCL", "product_ms": _two_ranks()}
    if device.type == "cuda":
        line["pinned"] = _pinned()
    print(json.dumps(line), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    for name in ("--rank", "--meeting"):
        parser.add_argument(name, type=int if name == "--rank" else str, help=argparse.SUPPRESS)
    return parser.parse_args()


def _size(device: torch.device) -> int:
    return 8192 if device.type == "cuda" else 256


def _product_ms(device: torch.device, size: int) -> float:
    """Return the median time of a product, by events where there is a GPU."""
    clock = one_device.clock_of(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    times = []
    for _ in range(12):
        begin = clock.mark()
        torch.mm(left, right, out=out)
        times.append((begin, clock.mark()))
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()  # of the products alone: receives go on waiting
    return round(1000 * sorted(clock.seconds(*pair) for pair in times[2:])[5], 4)


def _spinning(device: torch.device) -> dict[str, float]:
    """Return the time of a product beside kernels that spin, by their number."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(100_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = int(100_000_000 * SPINNING_MS / begin.elapsed_time(end))
    found = {}
    _product_ms(device, _size(device))
    for count in COUNTS:
        for _ in range(count):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(cycles)
        found[str(count)] = _product_ms(device, _size(device))
        torch.cuda.synchronize()
    return found


def _two_ranks() -> dict[str, Any]:
    """Return what rank 0 has measured."""
    with tempfile.TemporaryDirectory(prefix="receive-") as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--meeting", folder],
                env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},
            )
            for rank in range(2)
        ]
        try:
            for rank in ranks:
                if rank.wait(SECONDS):
                    raise RuntimeError("a rank ended with an error")
        finally:
            for rank in ranks:
                rank.kill()
        found: dict[str, Any] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
    return found


def _rank(rank: int, folder: Path, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=2,
    )
    found = {name: _beside_receives(rank, device, options) for name, options in OPTIONS.items()}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)


def _beside_receives(rank: int, device: torch.device, options: GroupOptions) -> dict[str, float]:
    """Return the time of a product beside receives that wait, by their number, on rank 0."""
    groups: list[Any] = [
        dist.new_group([0, 1], pg_options=options.for_backend(dist.get_backend()))
        for _ in range(max(COUNTS))
    ]
    message = torch.zeros(1 << 20, device=device)
    for group in groups:
        dist.all_reduce(message, group=group)  # which connects the two
    meeting: Any = dist.new_group([0, 1], backend="gloo")
    found = {}
    for count in COUNTS:
        if rank == 1:
            dist.barrier(meeting)  # rank 0 has multiplied
            for group in groups[:count]:
                dist.send(message, 0, group=group)
            continue
        works = []
        for group in groups[:count]:
            apart = (
                nullcontext() if device.type == "cpu" else torch.cuda.stream(torch.cuda.Stream())
            )
            with apart:
                works.append(dist.irecv(torch.empty_like(message), 1, group=group))
        time.sleep(0.1)  # until they spin
        found[str(count)] = _product_ms(device, _size(device))
        dist.barrier(meeting)
        for work in works:
            assert work is not None
            work.wait()
    return found


def _pinned() -> dict[str, int]:
    """Return the bytes that were asked for, and those that the machine has less of since."""
    asked = (1 << 30) + 1
    before = _available()
    kept = torch.empty(asked, dtype=torch.uint8, pin_memory=True)
    taken = before - _available()
    del kept
    return {"asked": asked, "taken": taken}


def _available() -> int:
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


if __name__ == "__main__":
    one_device.run(main)
