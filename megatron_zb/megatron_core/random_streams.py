"""Random states and streams of a model's layers, and weights that no placement changes.

Megatron gives every pipeline rank one stream: what a layer draws depends on the rank that holds it
and on what that rank has drawn before. A :class:`LayerStreams` gives every layer separate streams,
whichever rank holds it. Megatron has several random states (the host's, the device's, and those of
its tracker, of which some differ between tensor-parallel, expert-parallel or data-parallel ranks);
each has its own stream in every layer, equal on two ranks where Megatron's are. Seeds and states
are made on the host; no device is waited for.

There are two ways to the same initial weights under every schedule and pipeline size:

- :func:`layers_draw_weights` lets Megatron's own builders draw, from streams of every layer. It
  serves whatever they build; tensor-parallel and expert-parallel ranks draw as Megatron's do.
- :func:`initialise_by_global_name` draws each weight by itself, seeded by its global name. The
  model is then the same for every tensor-parallel size as well.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import multi_token_prediction, transformer_block
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import versions

_Named = TypeVar("_Named")

_HOST, _DEVICE = "host", "device"
# What makes a model draw random numbers in training, by the names of Megatron's config.
_DRAWING = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
    "mtp_hsm",
)
_EMBEDDING = "embedding.word_embeddings.weight"
_OUTPUT_LAYER = "output_layer.weight"
# Layers that write to the residual stream: Megatron scales their weights down with the depth.
_RESIDUAL_LAYERS = ("linear_proj", "linear_fc2", "out_proj")


class RandomState:
    """The states of all random generators that a model draws from.

    A tracker that CUDA graphs may capture (``--te-rng-tracker``, ``use_te_rng_tracker``) tracks
    generators, which move on in place. Others track tensors, which it replaces.
    """

    def __init__(self) -> None:
        self._host = torch.get_rng_state()
        self._device = torch.cuda.get_rng_state()
        self._tracked = dict(get_cuda_rng_tracker().get_states())
        self._values = {name: _value(state) for name, state in self._tracked.items()}

    def restore(self) -> None:
        """Restore the states; one that a module has added since stays as it is."""
        torch.set_rng_state(self._host)
        torch.cuda.set_rng_state(self._device)
        tracker = get_cuda_rng_tracker()
        tracker.set_states({**tracker.get_states(), **_set(self._tracked, self._values)})


def _value(state: torch.Tensor | torch.Generator) -> torch.Tensor:
    """Return a tracked state as a tensor that stays as it is."""
    return state.get_state() if isinstance(state, torch.Generator) else state


def _set(tracked: Mapping[str, Any], values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Set tracked generators to values; return what is to be tracked."""
    states: dict[str, Any] = dict(values)
    for name, state in tracked.items():
        if isinstance(state, torch.Generator):
            state.set_state(values[name])
            states[name] = state
    return states


def seed_of(*words: object) -> int:
    """Hash words to a seed of 63 bits."""
    digest = hashlib.sha256(":".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class LayerStreams:
    """Random streams of every layer, seeded by seed and layer, and in a step also by microbatch.

    Args:
        seed: the user's seed.
        replicas_differ: data-parallel ranks draw other numbers (``data_parallel_random_init``).
    """

    def __init__(self, seed: int, *, replicas_differ: bool = False) -> None:
        self._seed = seed
        self._replicas_differ = replicas_differ
        self._origins: dict[str, str] = {}
        self._generators: dict[Any, torch.Generator] = {}
        self._step: int | None = None
        self._microbatch = 0
        self._calls: Counter[str] = Counter()
        self._is_inside = False
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._seeded_chunks: WeakSet[torch.nn.Module] = WeakSet()

    @property
    def step(self) -> int | None:
        """The step whose streams are drawn from, None in an evaluation."""
        return self._step

    def start_step(self, step: int | None) -> None:
        """Switch to the streams of a step, counted from the start of training.

        None is an evaluation, which draws nothing.
        """
        self._step = step

    def start_pass(self, microbatch: int) -> None:
        """Switch to the streams of a microbatch, in a forward or a recomputation."""
        self._microbatch = microbatch
        self._calls.clear()

    @contextlib.contextmanager
    def of(self, place: str) -> Iterator[None]:
        """Draw from the streams of a place in the model, then restore the usual ones."""
        usual = RandomState()
        self._enter(place)
        try:
            yield
        finally:
            usual.restore()

    @contextlib.contextmanager
    def of_layer(self, place: str) -> Iterator[None]:
        """Draw from the streams of a layer; one inside another layer draws from the outer one's."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self.of(place):
                yield
        finally:
            self._is_inside = False

    def seed_forwards(self, chunk: torch.nn.Module) -> None:
        """Let the forwards of a chunk's embedding and layers draw from their own streams.

        Does nothing where the chunk draws nothing, and nothing more when it is called again.
        """
        if chunk in self._seeded_chunks or not _draws(chunk):
            return
        self._seeded_chunks.add(chunk)
        self._learn_origins()  # not in a forward, where one of the tracker's states may be in use
        for name, module in _layers(chunk):
            self._names[module] = name
            module.forward = partial(self._forward, name, module.forward)
        for block in versions.mixing_blocks(chunk):
            block.forward = partial(self._mix, block, block.forward)

    def seed_plan(self, plan: Any) -> None:
        """Let the parts of a plan's layers, which run one by one, draw as their layers do."""
        for number in range(plan.num_layers()):
            planned = plan.get_layer(number)
            name = self._names.get(planned.layer)
            if name is not None:
                layer = _LayerInParts(self, f"{name}:{self._step}:{self._microbatch}:0")
                for part in vars(planned).values():
                    if isinstance(part, ScheduleNode):
                        part.forward_func = partial(layer.run, part.forward_func)

    def _forward(
        self, name: str, forward: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Any:
        if self._step is None:
            return forward(*arguments, **keywords)
        call = self._calls[name]  # a layer may run several times in multi-token prediction
        self._calls[name] += 1
        with self.of_layer(f"{name}:{self._step}:{self._microbatch}:{call}"):
            return forward(*arguments, **keywords)

    def _mix(
        self, block: Any, forward: Callable[..., Any], *arguments: Any, **keywords: Any
    ) -> Any:
        """Run a block that mixes hidden states between its layers, which have their own streams.

        It draws from a tracked state that differs between data-parallel ranks alone.
        """
        if self._step is None:
            return forward(*arguments, **keywords)
        name = block.hidden_state_mixing_rng_tracker_name
        place = (name, block.dp_group.rank(), self._step, self._microbatch)
        state = self._seeded(seed_of(self._seed, *place), torch.cuda.current_device())
        usual, tracker = RandomState(), get_cuda_rng_tracker()
        states = tracker.get_states()
        tracked = {name: states.get(name, state)}  # a checkpoint of another placement may lack it
        tracker.set_states({**states, **_set(tracked, {name: state})})
        try:
            return forward(*arguments, **keywords)
        finally:
            usual.restore()

    def _enter(self, place: str) -> None:
        self._learn_origins()
        tracker = get_cuda_rng_tracker()
        states = {
            name: self._state(name, place) for name in self._origins if name not in (_HOST, _DEVICE)
        }
        tracker.set_states(_set(tracker.get_states(), states))
        torch.set_rng_state(self._seeded(seed_of(self._origins[_HOST], place), "cpu"))
        # in sequence parallelism, Megatron draws from one of its tracked states all along
        current = states.get(getattr(tracker, "_current_state_name", _DEVICE))
        torch.cuda.set_rng_state(self._state(_DEVICE, place) if current is None else current)

    def _state(self, name: str, place: str) -> torch.Tensor:
        return self._seeded(seed_of(self._origins[name], place), torch.cuda.current_device())

    def _seeded(self, seed: int, device: Any) -> torch.Tensor:
        """Return the state of a freshly seeded generator of a device; made on the host."""
        if device not in self._generators:
            found = torch.device("cuda", device) if isinstance(device, int) else device
            self._generators[device] = torch.Generator(device=found)
        state: torch.Tensor = self._generators[device].manual_seed(seed).get_state()
        return state

    def _learn_origins(self) -> None:
        """Keep a digest of each state as Megatron seeds it: equal on ranks that draw the same."""
        if self._origins:
            return
        seed = self._seed
        if self._replicas_differ:
            seed += 10 * parallel_state.get_data_parallel_rank()
        usual = RandomState()
        try:
            model_parallel_cuda_manual_seed(seed)
            states = {
                _HOST: self._seeded(seed, "cpu"),
                _DEVICE: torch.cuda.get_rng_state(),
                **{n: _value(s) for n, s in get_cuda_rng_tracker().get_states().items()},
            }
            self._origins = {name: _digest(name, state) for name, state in states.items()}
        finally:
            usual.restore()


def _draws(chunk: Any) -> bool:
    """Return whether a chunk draws random numbers: by its config, or in a module such as LoRA's."""
    if any(getattr(chunk.config, name, None) for name in _DRAWING):
        return True
    dropouts = (it for it in chunk.modules() if isinstance(it, torch.nn.Dropout))
    return any(it.p > 0 for it in dropouts)


class _LayerInParts:
    """The streams of a layer that is interrupted between its parts."""

    def __init__(self, streams: LayerStreams, place: str) -> None:
        self._streams, self._place = streams, place
        self._state: RandomState | None = None

    def run(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part, from the states that the part before has left."""
        with self._streams.of_layer(self._place):
            if self._state is not None:
                self._state.restore()
            result = part(*arguments)
            self._state = RandomState()
        return result


def _digest(name: str, state: torch.Tensor) -> str:
    return hashlib.sha256(name.encode() + bytes(state.tolist())).hexdigest()


# --- initial weights


@contextlib.contextmanager
def layers_draw_weights(streams: LayerStreams) -> Iterator[None]:
    """Let the embedding and each layer of a chunk that is built inside draw from its own streams.

    Everything else in a chunk draws from the streams of the output layer. Megatron's blocks
    (TransformerBlock, MultiTokenPredictionBlock, HybridStack) build their layers by
    ``build_module``, which is replaced while this context is active.
    """
    init = LanguageModelEmbedding.__init__

    def seeded_init(*arguments: Any, **keywords: Any) -> None:
        with streams.of_layer("embedding"):
            init(*arguments, **keywords)

    hybrid = versions.hybrid_block()
    blocks = {transformer_block: "decoder.layers", multi_token_prediction: "mtp.layers"}
    blocks |= {hybrid: "decoder.layers"} if hybrid else {}
    with contextlib.ExitStack() as contexts:
        contexts.enter_context(streams.of("output_layer"))
        contexts.enter_context(_replaced(LanguageModelEmbedding, "__init__", seeded_init))
        for block, layers in blocks.items():
            build = _seeded_builder(streams, block, layers)
            contexts.enter_context(_replaced(block, "build_module", build))
        yield


def _seeded_builder(streams: LayerStreams, block: Any, layers: str) -> Callable[..., Any]:
    """Return a ``build_module`` that seeds each layer by its number within its block."""
    build = block.build_module

    def build_seeded(*arguments: Any, **keywords: Any) -> Any:
        number = keywords.get("layer_number")
        if number is None:
            return build(*arguments, **keywords)
        if block is transformer_block:  # it counts from its stage
            number += get_transformer_layer_offset(keywords["config"], keywords.get("vp_stage"))
        with streams.of_layer(f"{layers}.{number - 1}"):
            return build(*arguments, **keywords)

    return build_seeded


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def initialise_by_global_name(
    model_chunks: Iterable[torch.nn.Module], config: Any, seed: int
) -> None:
    """Set every parameter of this rank's chunks to the value determined by its global name.

    Args:
        model_chunks: the chunks (GPTModel) as built, not yet wrapped in Float16Module or DDP.
        config: their TransformerConfig, for the initialisation methods.
        seed: the user's seed.

    Raises:
        UsageError: the model has experts spread over expert-parallel ranks.
    """
    if (getattr(config, "expert_model_parallel_size", 1) or 1) > 1:
        raise UsageError(
            "initialisation by name does not know expert parallelism: "
            "--expert-model-parallel-size must be 1"
        )
    with torch.no_grad():
        for chunk in model_chunks:
            for name, parameter in global_parameters(chunk).items():
                _initialise(parameter, name, chunk, config, seed)


def _initialise(
    parameter: torch.nn.Parameter, name: str, chunk: Any, config: Any, seed: int
) -> None:
    tied = getattr(chunk, "share_embeddings_and_output_weights", False)
    if tied and name.endswith(_OUTPUT_LAYER):  # the same name draws the same values
        name = name.removesuffix(_OUTPUT_LAYER) + _EMBEDDING
    method = _method(name, parameter, config)
    parallel = getattr(parameter, "tensor_model_parallel", False)
    shape = list(parameter.shape)
    size = parallel_state.get_tensor_model_parallel_world_size() if parallel else 1
    if size > 1:
        shape[parameter.partition_dim] *= size  # type: ignore[attr-defined]
    whole = torch.empty(shape, dtype=torch.float32)
    with _seeded(seed_of(seed, name)):
        method(whole)
    if size > 1:
        whole = _slice(whole, parameter, parallel_state.get_tensor_model_parallel_rank(), size)
    parameter.copy_(whole)


def _slice(whole: torch.Tensor, parameter: Any, rank: int, size: int) -> torch.Tensor:
    """Return the part of a weight that tensor-parallel rank `rank` holds.

    A gated MLP's first layer stacks gate and value (stride 2), and every rank holds a part of each.
    """
    stride: int = parameter.partition_stride
    pieces = whole.chunk(size * stride, dim=parameter.partition_dim)
    return torch.cat(pieces[rank::size], dim=parameter.partition_dim)


def _method(
    name: str, parameter: torch.nn.Parameter, config: Any
) -> Callable[[torch.Tensor], object]:
    """Return Megatron's initialisation method for the parameter of this global name."""
    module, _, kind = name.rpartition(".")
    if kind.endswith("bias"):
        return torch.nn.init.zeros_
    if parameter.dim() < 2:
        zero_centred = getattr(config, "layernorm_zero_centered_gamma", False)
        return torch.nn.init.zeros_ if zero_centred else torch.nn.init.ones_
    if module.startswith("embedding."):
        method = getattr(config, "embedding_init_method", None) or config.init_method
    elif module.rpartition(".")[2] in _RESIDUAL_LAYERS:
        method = config.output_layer_init_method
    else:
        method = config.init_method
    typed: Callable[[torch.Tensor], object] = method
    return typed


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, and put its state back afterwards.

    The default generator is used because initialisation methods do not take another one.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


# --- global names


def global_parameters(chunk: torch.nn.Module) -> Mapping[str, torch.nn.Parameter]:
    """Return the chunk's parameters by global name.

    A global name counts the layers of the whole model from 0, whichever chunk and rank hold them:
    `decoder.layers.5.mlp.linear_fc1.weight` is in the sixth layer.
    """
    return dict(_by_global_name(chunk, chunk.named_parameters()))


def global_modules(chunk: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Return the chunk's modules by global name, as :func:`global_parameters` its parameters."""
    return dict(_by_global_name(chunk, chunk.named_modules()))


def _by_global_name(
    chunk: torch.nn.Module, named: Iterable[tuple[str, _Named]]
) -> Iterator[tuple[str, _Named]]:
    layers = dict(_numbered(chunk))
    for name, value in named:
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), "")
        yield layers.get(layer, "") + name[len(layer) :], value


def _numbered(chunk: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of a chunk's layers, each with its global name."""
    for name, module in chunk.named_modules():
        block, _, number = name.rpartition(".")
        if number.isdigit() and hasattr(module, "layer_number"):
            yield name, f"{block}.{module.layer_number - 1}"


def _layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the embedding and the outermost layers of a chunk with their global names."""
    names, found = dict(_numbered(chunk)), ""
    for name, module in chunk.named_modules():
        if found and name.startswith(found):
            continue
        if name in names or isinstance(module, LanguageModelEmbedding):
            found = f"{name}."
            yield names.get(name, name), module
