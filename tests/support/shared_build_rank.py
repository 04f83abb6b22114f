"""One rank of a job that builds a schedule before it has process groups, and makes them then.

python shared_build_rank.py OUT [fail]      under torchrun, or with its variables by hand
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.job.agreement import store_of_job
from megatron_zb.job.shared_build import SharedBuild
from megatron_zb.schedules.interchange import digest


def main(out: Path, how: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    built = 0

    def build(name: str, **request: Any) -> schedules.Schedule:
        nonlocal built
        built += 1
        if how == "fail":
            raise UsageError("this cannot be built")
        return schedules.build(name, **request)

    shared = SharedBuild(lambda: store_of_job(world_size, attempt), rank, world_size, build)
    # Ranks of different attempts ask for different schedules: none may get that of the last one.
    sizes = {"pipeline_size": 2, "num_microbatches": 4 + int(attempt)}
    said = ""
    try:
        found = shared("v-zb", **sizes)
    except UsageError as error:
        said = str(error)
        total, table = 0.0, ""
    else:
        groups = dist.PrefixStore("groups", store_of_job(world_size, attempt))
        dist.init_process_group("gloo", store=groups, rank=rank, world_size=world_size)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        total, table = ones.item(), digest(found)
        evaluation = shared("v-zb", **{**sizes, "num_microbatches": 3})
        table += digest(evaluation)
        dist.barrier()
        dist.destroy_process_group()
    values = {"built": built, "total": total, "table": table, "said": said}
    (out / f"{attempt}-{rank}.json").write_text(json.dumps(values), encoding="utf-8")
    if how == "restart" and attempt == "0":
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
