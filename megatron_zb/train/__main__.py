"""Train a GPT model: `torchrun --nproc-per-node 4 -m megatron_zb.train --help`."""

from __future__ import annotations

import sys

from megatron_zb.train.launch import launch


def main() -> None:
    """Run the training that the command line describes; ends the process."""
    launch(sys.argv[1:])


if __name__ == "__main__":
    main()
