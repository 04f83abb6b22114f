"""Imports of weights by Megatron-Bridge into a model whose both ends are on one rank.

Megatron-Bridge looks for the output layer in the last chunk of the last rank and for its tied
embedding in the same chunk or on another rank. In a V the embedding is in the first chunk, so the
output layer would get memory that nothing has written.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_zb.megatron_core.model_ends import tie_embeddings, tied_weights
from megatron_zb.megatron_lm.replacing import Undo, replace_method

MODULE = "megatron.bridge.models.conversion.model_bridge"
_CLASS, _METHOD = "MegatronModelBridge", "_broadcast_shared_embeddings"


def tie_after_imports() -> Undo | None:
    """Replace how the importer ties weights; return what undoes that, nothing without importer.

    A process that has not imported Megatron-Bridge has none.
    """
    importer = getattr(sys.modules.get(MODULE), _CLASS, None)
    if not hasattr(importer, _METHOD):
        return None
    return replace_method(importer, _METHOD, _tie)


def _tie(original: Any, importer: Any, model: Any) -> None:
    chunks = model if isinstance(model, list) else [model]
    if tied_weights(chunks) is None:
        original(importer, model)
    else:
        tie_embeddings(chunks)
