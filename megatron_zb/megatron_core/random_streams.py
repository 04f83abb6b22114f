"""The random states of a model, and random streams of each layer.

Megatron gives every pipeline rank one stream: what a layer draws depends on the rank that holds it
and on what that rank has drawn before. A :class:`LayerStreams` gives every layer streams of its
own, whichever rank holds it. Megatron has several random states (the host's, the device's, and
those of its tracker, of which some differ between tensor-parallel, expert-parallel or
data-parallel ranks); each has its own stream in every layer, equal on two ranks where Megatron's
are. Seeds and states are made on the host; no device is waited for.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed

_HOST, _DEVICE = "host", "device"
# What makes a model draw random numbers in training, by the names of Megatron's config.
_DRAWING = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "moe_router_force_biased",
)


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
        torch.set_rng_state(self._host)
        torch.cuda.set_rng_state(self._device)
        get_cuda_rng_tracker().set_states(_set(self._tracked, self._values))


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
    """Random streams of every layer, seeded by seed and layer, and in a step by microbatch, too.

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

        Does nothing where the config of the chunk draws nothing.
        """
        config: Any = chunk.config
        if not any(getattr(config, name, None) for name in _DRAWING):
            return
        self._learn_origins()  # not in a forward, where one of the tracker's states may be in use
        for name, module in _layers(chunk):
            self._names[module] = name
            module.forward = partial(self._forward, name, module.forward)

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


def global_name(name: str, module: Any) -> str:
    """Return the name of a layer, numbered from 0 in the whole model, whichever chunk holds it."""
    return f"{name.rpartition('.')[0]}.{module.layer_number - 1}"


def _layers(chunk: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the embedding and the outermost layers of a chunk with their global names."""
    found: list[str] = []
    for name, module in chunk.named_modules():
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        if isinstance(module, LanguageModelEmbedding):
            found.append(name)
            yield name, module
        elif name.rpartition(".")[2].isdigit() and hasattr(module, "layer_number"):
            found.append(name)
            yield global_name(name, module), module


def _digest(name: str, state: torch.Tensor) -> str:
    return hashlib.sha256(name.encode() + bytes(state.tolist())).hexdigest()
