"""Models that a schedule can run, by the names of Megatron's classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_zb.errors import UsageError
from megatron_zb.job.settings import STREAMS_FLAG
from megatron_zb.megatron_core import versions
from megatron_zb.megatron_core.model_ends import language_model, why_not_placed
from megatron_zb.megatron_core.refusals import OVERLAP
from megatron_zb.megatron_lm import replacing
from megatron_zb.parsing import flag_of


@dataclass(frozen=True)
class Supported:
    """Proven support for the models of a class; all run one chunk per rank."""

    in_a_v: bool = False
    draws_by_layer: bool = False
    """Whether each layer can draw its weights from separate RNG states."""
    last: tuple[int, int] | None = None
    """The last series of Megatron-LM in which neither has been proven, if there is one."""

    def is_proven(self) -> bool:
        return self.last is None or versions.core_series() > self.last


# A HybridModel was called MambaModel before 0.18. Each may have
# an encoder in front, as its `language_model`.
MODELS = {
    "GPTModel": Supported(in_a_v=True, draws_by_layer=True),
    "BertModel": Supported(draws_by_layer=True),
    "MambaModel": Supported(in_a_v=True, draws_by_layer=True, last=versions.WITHOUT_HYBRID_CHUNKS),
    "HybridModel": Supported(in_a_v=True, draws_by_layer=True),
}


@contextmanager
def naming_chunk(vp_stage: int | None) -> Iterator[None]:
    """Pass ``vp_stage`` to language models with virtual stages that are built without it.

    Providers of vision-language models in Megatron-Bridge take ``vp_stage`` and drop it.
    """
    if vp_stage is None:
        yield
        return
    from megatron.core.models.gpt import GPTModel

    def build(original: Any, model: Any, *args: Any, **keywords: Any) -> None:
        given = signature(original).bind_partial(model, *args, **keywords)
        has_chunks = getattr(
            given.arguments.get("config"), "virtual_pipeline_model_parallel_size", None
        )
        takes_stage = "vp_stage" in given.signature.parameters
        if has_chunks and takes_stage and given.arguments.get("vp_stage") is None:
            given.arguments["vp_stage"] = vp_stage
            original(*given.args, **given.kwargs)
            return
        original(model, *args, **keywords)

    bases = [GPTModel, *versions.hybrid_models()]
    kinds = [kind for base in bases for kind in _kinds_of(base)]
    undo = [replacing.replace_method(kind, "__init__", build) for kind in kinds]
    try:
        yield
    finally:
        for each in undo:
            each()


@contextmanager
def answering(place: dict[str, Any]) -> Iterator[None]:
    """Answer a builder without ``vp_stage`` for the chunk that is being built.

    It asks for the layers of the chunk, too.
    """
    undo = replacing.replace(transformer_block, "get_num_layers_to_build", _layers_of_chunk)
    try:
        with answering_ends(place):
            yield
    finally:
        undo()


@contextmanager
def answering_ends(place: dict[str, Any]) -> Iterator[None]:
    """Answer a builder that asks which ends of the pipeline a chunk has.

    The one in ``pretrain_vlm.py`` does.
    """
    ends = {"is_pipeline_first_stage": "pre_process", "is_pipeline_last_stage": "post_process"}
    undo = [
        replacing.replace(parallel_state, name, lambda *asked, end=end, **more: place[end])
        for name, end in ends.items()
    ]
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def _layers_of_chunk(original: Any, config: Any, *rest: Any, **keywords: Any) -> int:
    given = signature(original).bind(config, *rest, **keywords).arguments
    if config.pipeline_model_parallel_size > 1 and given.get("vp_stage") is None:
        raise UsageError(
            "the script's model provider takes no vp_stage and asks for the layers of a chunk: let "
            "it take vp_stage, or use a schedule with one chunk per rank, such as zb-h1"
        )
    return int(original(config, *rest, **keywords))


def _kinds_of(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all classes made from it that have a constructor of their own."""
    if "__init__" in vars(cls):
        yield cls
    for kind in cls.__subclasses__():
        yield from _kinds_of(kind)


def plain_settings(chunk: Any) -> dict[str, Any]:
    """Return the numbers, words and switches of the config that a chunk's layers read."""
    config = getattr(language_model(chunk), "config", None)
    found = {name: getattr(config, name, None) for name in TransformerConfig.__dataclass_fields__}
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in found.items() if isinstance(value, plain)}


def check_settings(chunk: Any, before: dict[str, Any], schedule: str) -> None:
    """Refuse a config that has changed while another chunk of its rank was built.

    Layers such as those of Megatron-Bridge's Step-3.5 write their own settings into the config that
    all share, so that the chunks built before would compute with those of the last.

    Raises:
        UsageError: names the first such setting.
    """
    now = plain_settings(chunk)
    changed = [name for name, value in before.items() if now.get(name, value) != value]
    if changed:
        name = changed[0]
        raise UsageError(
            f"--pipeline-schedule {schedule} cannot run a {type(chunk).__name__} whose chunks "
            f"share one config: building a chunk has changed {name} from {before[name]} to "
            f"{now[name]} for the others, too; use a schedule with one chunk per rank, such as "
            "zb-h1"
        )


def check_pairs_of_model(chunk: Any) -> None:
    """Refuse models of which Megatron's plans would compute something else, or nothing at all.

    Raises:
        UsageError: names the part of the model that prevents it.
    """
    name = type(chunk).__name__
    if "GPTModel" not in (kind.__name__ for kind in type(chunk).__mro__):
        raise UsageError(f"{flag_of(OVERLAP)} cannot run a {name}: only GPTModel is supported")
    frozen = next((name for name, p in chunk.named_parameters() if not p.requires_grad), None)
    if frozen is not None:
        raise UsageError(
            f"{flag_of(OVERLAP)} cannot run a model with frozen weights, such as {frozen}: "
            "Megatron's plans want a gradient of everything; leave the flag out"
        )
    layers = chunk.decoder.layers
    norm = getattr(chunk.decoder, "final_layernorm", None)
    if norm is not None and len(layers) and not hasattr(layers[-1].mlp, "experts"):
        raise UsageError(
            f"{flag_of(OVERLAP)} cannot run a model whose last layer has no experts: Megatron's "
            "plans would leave the final norm out; change --moe-layer-freq"
        )


def check_model(chunk: Any, schedule: str, in_a_v: bool, draws_by_layer: bool) -> None:
    """Refuse models whose chunks exchange more than one tensor, or that are unproven in a V.

    Raises:
        UsageError: names the model and those that are supported.
    """
    name, staged = type(chunk).__name__, language_model(chunk)
    supported = next(
        (MODELS[c.__name__] for c in type(staged).__mro__ if c.__name__ in MODELS), None
    )
    refused = f"--pipeline-schedule {schedule} cannot run a {name}"
    if supported is None:
        raise UsageError(
            f"{refused}: it runs {', '.join(MODELS)}, and models with one of these as their "
            "language_model on every stage and encoders on the first"
        )
    if not supported.is_proven():
        supported = Supported()
    if staged is not chunk:
        if why := why_not_placed(chunk):
            raise UsageError(f"{refused}: {why}")
        supported = replace(supported, draws_by_layer=False)
    if in_a_v and not supported.in_a_v:
        raise UsageError(f"{refused}: use one with one chunk per rank, such as zb-h1")
    if draws_by_layer and not supported.draws_by_layer:
        raise UsageError(
            f"the layers of a {name} cannot draw their weights from random streams of their own: "
            f"add {STREAMS_FLAG} rank"
        )
    if getattr(getattr(chunk, "config", None), OVERLAP, False):
        check_pairs_of_model(chunk)
