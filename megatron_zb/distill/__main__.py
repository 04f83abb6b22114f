"""Distil a GPT block by block: `torchrun --nproc-per-node 2 -m megatron_zb.distill --help`."""

from __future__ import annotations

import sys

from megatron_zb.distill.launch import launch


def main() -> None:
    """Run the distillation that the command line describes; ends the process."""
    launch(sys.argv[1:])


if __name__ == "__main__":
    main()
