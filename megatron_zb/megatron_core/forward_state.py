"""State that the forwards of a model change: running averages, counters, tokens per expert.

F of a microbatch reads the state that earlier forwards have left, and updates it. R repeats the
forward later: it has to read what F has read, and to leave no update. Nothing declares such state,
so forwards of the first step show it:

1. Before a forward, all is recorded that the modules of a chunk refer to: buffers, attributes and
   hooks, objects and containers in these, and variables of the user's functions.
2. After it, each value that differs is a ``StatePlace``.
3. A tensor that every forward sets anew may be scratch, such as the routing map of a dispatcher.
   The next forward is watched: if it sets the tensor without reading it, its value is not recorded.
   Scratch would keep activations alive.
4. From the second step on, forwards record the values of the places found.

What Python does not see is not found: files, generators, objects of C++ and of other packages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.utils import unwrap_model

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.step import Step, StepPart
from megatron_zb.runtime.saved_state import MOST, Saved, StatePlace, on_one_device

# Packages whose objects are no user's, and those of Megatron whose objects belong to a model.
_LIBRARIES = {"megatron", "megatron_zb", "torch", "transformer_engine", "apex"}
_OF_MODELS = ("megatron.core.transformer", "megatron.core.models", "megatron.core.ssm")
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

LEARNED_FROM = 8
"""Forwards of a chunk, in its first step, that show what changes: each costs a walk through it."""

Entries = MutableMapping[Any, Any]
_Key = tuple[int, Any]


class ForwardState:
    """The state of one chunk of a model.

    Args:
        chunk: the chunk; wrappers such as data parallelism keep a state of their own.
        forward_step: the user's function that runs it.
    """

    def __init__(self, chunk: torch.nn.Module, forward_step: Callable[..., Any]) -> None:
        (self.model,) = unwrap_model([chunk])
        self._forward_step = forward_step
        self._places: dict[_Key, StatePlace] = {}
        self._forwards = 0
        self.is_known = False
        """Whether forwards have shown all places."""

    @property
    def places(self) -> list[StatePlace]:
        """Return what forwards were seen to change."""
        return list(self._places.values())

    @contextmanager
    def recorded(self) -> Iterator[list[Saved]]:
        """Record the state at the start of the forward inside; the list is complete at its end."""
        record: list[Saved] = []
        if self.is_known:
            record += filter(_is_recorded, map(_saved, self.places))
            yield record
            return
        before = _StateBefore(self._walked())
        with ExitStack() as watches:
            for place in self.places:
                if place.may_be_scratch:
                    watches.enter_context(place.watching())
            yield record
        record += filter(_is_recorded, self._learned(before))
        self._forwards += 1
        self.is_known = self._forwards >= LEARNED_FROM

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Undo all changes that the forwards and backwards inside make to the state."""
        before = _StateBefore(self._walked())
        yield
        for saved in self._learned(before):
            if not saved.is_gone:  # what a forward has set in its place is no state either
                saved.put_back()

    @contextmanager
    def repeating(self, record: Sequence[Saved]) -> Iterator[None]:
        """Run the forward inside with a recorded state, and undo its updates."""
        now = [Saved(p, copies=p.is_changed_in_place, keeps=True) for p in self.places]
        for saved in record:
            saved.put_back()
        try:
            yield
        finally:
            for saved in now:
                saved.put_back()

    def _learned(self, before: _StateBefore) -> list[Saved]:
        """Add the places that have changed since; return the values of then of all places."""
        before.add_made(self._walked())
        for key in before.changed():
            saved = before.values[key]
            place = self._places.setdefault(key, saved.place)
            place.is_changed_in_place |= saved.is_same_object
            place.changes += 1
        found = [before.values[key] for key in self._places if key in before.values]
        for saved in found:
            saved.place = self._places[saved.place.key]
        return found

    def _walked(self) -> _Walk:
        """Reach all that the model and the function refer to."""
        walk = _Walk(self.model)
        for module in self.model.modules():
            walk.enter(module, "", "")
        walk.enter(self._forward_step, "the forward step", "")
        return walk


class _StateBefore:
    """The values of all places before a forward, by their keys."""

    def __init__(self, walk: _Walk) -> None:
        self._seen = walk.seen
        self.values = {
            place.key: Saved(
                place, copies=place.is_buffer or place.is_of_user, keeps=place.is_of_user
            )
            for place in walk.places
        }

    def add_made(self, walk: _Walk) -> None:
        """Add the places that objects have now, and had not before."""
        for place in walk.places:
            if place.key not in self.values and place.key[0] in self._seen:
                self.values[place.key] = _made(place)

    def changed(self) -> list[_Key]:
        """Return the places whose values have changed; waits for a device once."""
        found = {key: saved.change() for key, saved in self.values.items()}
        flags = {key: change for key, change in found.items() if isinstance(change, torch.Tensor)}
        if flags:
            read = torch.stack(on_one_device(list(flags.values()))).tolist()
            found |= zip(flags, read, strict=True)
        return [key for key, change in found.items() if change]


class StatePart(StepPart):
    """Lets recomputed forwards run with the state of their first run, and leave none.

    With token slices, a forward runs once for each slice, and so would a user's updates. In steps
    that are read ahead, forwards run in another order than the data's. Adapters that share a
    pipeline would share the state. Updates of a user's state are refused there, after the first
    step.
    """

    def __init__(self) -> None:
        self.states: dict[int, ForwardState] = {}
        self._is_checked = False

    def wrap_stage(self, number: int, stage: Any, step: Step) -> None:
        has_forwards = hasattr(stage, "state") and not step.forward_only
        if has_forwards and (stage.recomputed or _refusal(step)):
            # what is undone is no update, and is learned from once more in the step
            states = {} if step.is_rehearsal else self.states
            if number not in states:
                chunk = step.model[stage.chunk]
                states[number] = ForwardState(chunk, step.forward_step_func)
            stage.state = states[number]

    def after_step(self, step: Step) -> None:
        if step.forward_only:
            return
        for state in self.states.values():
            state.is_known = True
        refusal = _refusal(step)
        if refusal and not self._is_checked:  # so on all ranks, whichever of them recomputes
            self._is_checked = True
            places = [place for state in self.states.values() for place in state.places]
            _refuse_users_state(step, places, refusal)


def _refusal(step: Step) -> str:
    """Return why a user's state would be another one than under Megatron's schedule, if it would.

    The text has a place for the name of the state.
    """
    if any(part.fact == "is_sliced" for part in step.parts):
        return (
            "--pipeline-slices: forwards update {}, which would be updated once for each slice of "
            "a microbatch instead of once: leave the flag out for this model"
        )
    if any(part.fact == "has_adapters" for part in step.parts):
        return (
            "adapters in one pipeline: forwards update {}, in which the microbatches of all "
            "adapters would be mixed: train each adapter in a run of its own with this model"
        )
    if step.order is not None and list(step.order) != sorted(step.order):
        return (
            "forwards update {}, which would be updated in another order, as microbatches are read "
            "ahead and reordered by their lengths: do not read ahead for this model"
        )
    return ""


def _refuse_users_state(step: Step, places: Sequence[StatePlace], refusal: str) -> None:
    """Raise a UsageError on all ranks if one has a state that a user's code updates.

    Collective over the pipeline.
    """
    updated = (p for p in places if p.is_of_user and p.is_state and p.changes > 1)
    own = next((place.label for place in updated), None)
    everyone: list[str | None] = [None] * step.pg_collection.pp.size()
    dist.all_gather_object(everyone, own, group=step.pg_collection.pp)
    label = next(filter(None, everyone), None)
    if label is not None:
        raise UsageError(refusal.format(label))


def _saved(place: StatePlace) -> Saved:
    return Saved(place, copies=place.is_changed_in_place, keeps=place.is_of_user)


def _made(place: StatePlace) -> Saved:
    """Return what was saved of a place before a forward has made it."""
    value = place.entries.pop(place.name)
    try:
        return Saved(place, copies=False, keeps=True)
    finally:
        place.entries[place.name] = value


def _is_recorded(saved: Saved) -> bool:
    """Return whether R needs a value: large tensors of Megatron's objects are activations."""
    place = saved.place
    is_activation = saved.is_large and not (place.is_of_user or place.is_buffer or place.is_read)
    return place.is_state and not is_activation and not saved.is_gone


# --- what can be reached


class _Walk:
    """A walk through a model from object to object, depth first.

    It follows objects of the package that refers to them: a user's modules and functions to the
    user's objects, Megatron's modules to those of Megatron's models.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.places: list[StatePlace] = []
        self._labels = {id(m): name or type(m).__name__ for name, m in model.named_modules()}
        self.seen: dict[int, Any] = {}
        self._globals: set[tuple[str, str]] = set()

    def enter(self, value: Any, label: str, package: str) -> None:
        """Visit a value, whose holder is of a package."""
        if isinstance(value, torch.Tensor) or id(value) in self.seen:
            return
        if isinstance(value, torch.nn.Module):
            self._enter_module(value, self._labels.get(id(value), label))
        elif isinstance(value, partial):
            self._once(value)
            for name, one in (("", value.func), *enumerate(value.args), *value.keywords.items()):
                self.enter(one, f"{label} {name}".strip(), package)
        elif isinstance(value, MethodType):
            self.enter(value.__func__, label, package)
            self.enter(value.__self__, label, _package(value.__func__.__module__))
        elif isinstance(value, FunctionType):
            self._enter_function(value, label)
        elif isinstance(value, dict) and len(value) <= MOST:
            self._once(value)
            self._hold(value, label, package)
        elif isinstance(value, list | tuple | deque) and len(value) <= MOST:
            self._once(value)
            for number, one in enumerate(value):
                self.enter(one, f"{label}[{number}]", package)
        elif _is_followed(value, package):
            self._once(value)
            self._once(vars(value))
            self._hold(vars(value), label, package)

    def _enter_module(self, module: torch.nn.Module, label: str) -> None:
        """Visit buffers, attributes and hooks of a module."""
        for holder in (module, module._buffers, vars(module)):
            self._once(holder)
        package = _package(type(module).__module__)
        is_of_user = partial(_is_of_user, type(module))
        for name in module._buffers:
            place = StatePlace(module._buffers, name, f"{label}.{name}", is_of_user(name), True)
            self._add(place, package)
        for name in vars(module).keys() - _OF_EVERY_MODULE:
            place = StatePlace(vars(module), name, f"{label}.{name}", is_of_user(name))
            self._add(place, package)
        for name in _HOOKS:
            for hook in vars(module)[name].values():
                self.enter(hook, f"a hook of {label}", package)

    def _enter_function(self, function: FunctionType, label: str) -> None:
        """Visit the variables of enclosing functions and of the module that a function names."""
        self._once(function)
        package = _package(function.__module__)
        if package in _LIBRARIES:
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            place = StatePlace(
                _ClosureCell(cell), "cell_contents", f"{label}.{name}", True, holder=cell
            )
            self._add(place, package)
        for name in _names(function.__code__) & function.__globals__.keys():
            if (function.__module__, name) not in self._globals:
                self._globals.add((function.__module__, name))
                place = StatePlace(
                    function.__globals__, name, f"{function.__module__}.{name}", True
                )
                self._add(place, package)

    def _hold(self, entries: Entries, label: str, package: str) -> None:
        """Visit all entries of a mapping."""
        is_of_user = package not in _LIBRARIES
        for name in list(entries):
            self._add(StatePlace(entries, name, f"{label}.{name}", is_of_user), package)

    def _add(self, place: StatePlace, package: str) -> None:
        self.places.append(place)
        self.enter(place.value, place.label, package)

    def _once(self, value: Any) -> None:
        self.seen[id(value)] = value  # kept, so that no other object gets its number


class _ClosureCell(MutableMapping[str, Any]):
    """The variable of an enclosing function, as a mapping with one entry."""

    _ENTRY = "cell_contents"

    def __init__(self, cell: CellType) -> None:
        self._cell = cell

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # not set yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents

    def __iter__(self) -> Iterator[str]:
        return iter([self._ENTRY] if self._ENTRY in self else [])

    def __len__(self) -> int:
        return int(self._ENTRY in self)


def _names(code: CodeType) -> set[str]:
    """Return the names of variables and attributes, also in strings, in a function."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    texts = (one for one in code.co_consts if isinstance(one, str))
    return {*code.co_names, *texts}.union(*map(_names, inner))


def _is_of_user(kind: type, name: str) -> bool:
    """Return whether an attribute is a user's: the code of a library's class does not name it."""
    return _package(kind.__module__) not in _LIBRARIES or name not in _names_in(kind)


@cache
def _names_in(kind: type) -> set[str]:
    """Return the names in the methods of a class and of those that it derives from."""
    methods = (one for base in kind.__mro__ for one in vars(base).values())
    return set().union(*(_names(m.__code__) for m in methods if isinstance(m, FunctionType)))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_followed(value: Any, package: str) -> bool:
    """Return whether an object belongs to the package that refers to it, and may have a state."""
    kind = type(value)
    if not hasattr(value, "__dict__") or isinstance(value, type | ModelParallelConfig):
        return False
    if hasattr(kind, "__next__"):  # data that another thread may be reading
        return False
    if package == "megatron":
        return kind.__module__.startswith(_OF_MODELS)
    return package not in _LIBRARIES and _package(kind.__module__) == package
