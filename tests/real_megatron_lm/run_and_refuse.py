"""The launcher, but the model of one rank has a layer that is refused, or cannot be built.

The variable BUILDS says which: "operation" is a stand-in with the name of a class of
Transformer-Engine's, which is not installed here; "nothing" raises what Python would.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import nn

from megatron_zb.launch import main

RANK = 1


class BasicLinear(nn.Module):
    """The name is all that counts."""


BasicLinear.__module__ = "transformer_engine.pytorch.ops.basic.basic_linear"


def change_the_model(builds: str) -> None:
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def changed(model: Any, *args: Any, **keywords: Any) -> None:
        if builds == "nothing":
            raise RuntimeError("no memory is left for the model")
        build(model, *args, **keywords)
        model.operation = BasicLinear()

    GPTModel.__init__ = changed


if __name__ == "__main__":
    import runpy

    run_path = runpy.run_path

    def run(*arguments: Any, **keywords: Any) -> Any:
        if os.environ["RANK"] == str(RANK):
            change_the_model(os.environ["BUILDS"])
        return run_path(*arguments, **keywords)

    runpy.run_path = run
    main(sys.argv[1:])
