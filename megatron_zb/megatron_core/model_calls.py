"""Calls of the model in the user's forward step: what they return, and outputs given in its place.

With a vocabulary-parallel embedding, the first stage reads a microbatch ahead of its F. With a
vocabulary-parallel output layer, the model of the last stage returns hidden states in place of the
losses. In both cases, the user's forward step gets an :class:`UnfinishedOutput` and must return it
unchanged. No exception ends the forward step: it would leave the user's context managers, and some
of them print it, such as Megatron's straggler detector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch.utils._pytree import tree_leaves

from megatron_zb.errors import UsageError

_READ_ONLY = frozenset({"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"})
_UNCHANGED = frozenset({"contiguous", "float"})
"""Functions that leave the losses of tokens as they are: in float32, one behind the other."""
_SIZES = frozenset({"dim", "element_size", "is_floating_point", "numel", "size"})


class ModelCall(NamedTuple):
    """The arguments of a call of the model."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]


class UnfinishedOutput(torch.Tensor):
    """Tensor that keeps the names of the functions that are called with it, in ``uses``."""

    uses: list[str]

    @classmethod
    def like(cls, tensor: torch.Tensor) -> UnfinishedOutput:
        """Return an alias of a tensor."""
        found = tensor.as_subclass(cls)
        found.uses = []
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
        if name in _UNCHANGED and len(args) == 1 and not kwargs:
            return args[0]
        if name not in _READ_ONLY | _SIZES:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, cls):
                    leaf.uses.append(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def inner_model(chunk: Any) -> Any:
    """Return the model in the wrappers of data parallelism and of precision."""
    return get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[Any]]:
    """Record what a module returns inside, in the order of its calls."""
    found: list[Any] = []
    hook = module.register_forward_hook(lambda _module, _arguments, output: found.append(output))
    try:
        yield found
    finally:
        hook.remove()


@contextmanager
def calls_replaced(model: torch.nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """Run another function in place of the model and its hooks, as ``Module.compile`` does."""
    usual = model._compiled_call_impl
    model._compiled_call_impl = call
    try:
        yield
    finally:
        model._compiled_call_impl = usual


def usual_call(model: torch.nn.Module) -> Callable[..., Any]:
    """Return the function that a call of the model runs: the model with its hooks, or another."""
    found: Callable[..., Any] = model._compiled_call_impl or model._call_impl
    return found


def answered(chunk: Any, output: torch.Tensor) -> AbstractContextManager[None]:
    """Let calls of the model return an output, in the place that its layers and hooks have."""
    return calls_replaced(inner_model(chunk), lambda *_arguments, **_options: output)


def read_up_to_model(
    forward_step: Callable[[], Any], model: torch.nn.Module, output: torch.Tensor
) -> ModelCall:
    """Run the user's forward step without the model; return the arguments of the model's call.

    Args:
        forward_step: the user's forward step, with its arguments.
        model: the model, which is not run.
        output: a tensor like the output of the model.

    Raises:
        UsageError: the forward step does not call the model, or it uses the output.
    """
    calls: list[ModelCall] = []
    unfinished = UnfinishedOutput.like(output)

    def call(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(ModelCall(arguments, options))
        return unfinished

    with calls_replaced(model, call):
        try:
            returned = forward_step()
        except Exception as error:
            if unfinished.uses:
                raise _used(unfinished.uses[0], "first", "embedding") from error
            raise
    if not calls:
        raise UsageError(
            "the forward step did not call the model of the first stage, so the embedding "
            "cannot be vocabulary parallel: give --pipeline-vocabulary off"
        )
    _check_unchanged(unfinished, returned, "first", "embedding")
    return calls[-1]


def run_without_use(forward_step: Callable[[], Any], model: torch.nn.Module) -> tuple[Any, Any]:
    """Run the user's forward step on the last stage; return the output and the loss function.

    Raises:
        UsageError: the forward step uses the output, which is hidden states and no losses.
    """
    found: list[tuple[torch.Tensor, UnfinishedOutput]] = []
    usual = usual_call(model)

    def call(*arguments: Any, **options: Any) -> Any:
        output = usual(*arguments, **options)
        if not isinstance(output, torch.Tensor):
            return output
        found.append((output, UnfinishedOutput.like(output)))
        return found[-1][1]

    with calls_replaced(model, call):
        try:
            returned = forward_step()
        except Exception as error:
            if found and found[-1][1].uses:
                raise _used(found[-1][1].uses[0], "last", "output layer") from error
            raise
    if not found:  # a plan of the model, which runs later
        return returned
    output, unfinished = found[-1]
    _check_unchanged(unfinished, returned, "last", "output layer")
    return output, returned[1]


def _check_unchanged(unfinished: UnfinishedOutput, returned: Any, end: str, layer: str) -> None:
    output = returned[0] if isinstance(returned, tuple | list) else returned
    if unfinished.uses or output is not unfinished:
        raise _used(next(iter(unfinished.uses), "another output"), end, layer)


def _used(name: str, end: str, layer: str) -> UsageError:
    return UsageError(
        f"the forward step uses the output of the model of the {end} stage ({name}) before it "
        f"returns it, so the {layer} cannot be vocabulary parallel: compute in the loss function, "
        "or give --pipeline-vocabulary off"
    )
