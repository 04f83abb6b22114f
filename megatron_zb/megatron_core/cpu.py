"""Megatron on the CPU: every CUDA call of Megatron's is redirected to the CPU.

Megatron takes a CUDA device for granted: it asks `torch.cuda` for the current device, creates
small tensors with `device="cuda"` and keeps its random state in CUDA's generator. `run_on_cpu`
redirects those calls, so that unmodified Megatron trains over gloo on CPU ranks. It is meant for
debugging and tests; nothing here happens unless it is called, and nothing else in this package
knows about it.

`training_loop=True` adds the calls of Megatron-LM's training loop.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any

import torch

_CPU = torch.device("cpu")

# Functions that create tensors and that Megatron calls with device="cuda" or the current device.
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "rand", "randn", "tensor", "zeros")


def run_on_cpu(*, training_loop: bool = False) -> None:
    """Redirect Megatron's CUDA calls to the CPU in this process; calling it again does nothing.

    Must be called before the first import of `megatron`, because Megatron's modules decide while
    they are imported whether to compile their fused functions.

    Args:
        training_loop: Megatron-LM's own training loop also runs. It does not start unless
            `torch.cuda` says that there is a GPU, so then it says so.
    """
    cuda: Any = torch.cuda
    if getattr(cuda, "redirected_to_cpu", False):
        return
    # A GPU that happens to be there stays unused, also by libraries that are not redirected.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    _redirect_compilation()
    _redirect_devices()
    _redirect_factories()
    _redirect_tensor_methods()
    _redirect_random_state()
    if training_loop:
        _redirect_training_loop()
        redirect_experts()
        redirect_predictions()
        keep_messages()
        share_norms()
        sum_norms_in_single_precision()
    cuda.redirected_to_cpu = True


def prepare_arguments(args: Any) -> None:
    """Set the arguments of Megatron-LM without which it does not run on a CPU."""
    for name, value in _CPU_ARGUMENTS.items():
        if hasattr(args, name):
            setattr(args, name, value)
    if any(getattr(args, name, False) for name in _PACKED):
        from megatron_zb.megatron_core.versions import sum_lengths_on_cpu

        args.create_attention_mask_in_dataloader = False
        sum_lengths_on_cpu()


# Communication over gloo, and no fused kernel.
_CPU_ARGUMENTS = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "no_persist_layer_norm": True,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "create_attention_mask_in_dataloader": True,
}

# Their samples have the ends of sequences instead of a mask.
_PACKED = ("sft", "dataloader_inter_document_masking")


def _redirect_compilation() -> None:
    """Run fused functions uncompiled, since compiling them takes minutes and a C++ compiler."""

    def identity(model: Any = None, **_options: Any) -> Any:
        return model if model is not None else lambda function: function

    torch.compile = identity


def _redirect_devices() -> None:
    """Report the CPU as the only device, which is always ready."""
    cuda: Any = torch.cuda
    # megatron-core passes it on to the functions that create tensors
    cuda.current_device = lambda: _CPU
    # after every exchange of activations, and around timers and checkpoints
    cuda.synchronize = _nothing()
    # around the reduction of gradients; everything done on a stream is done at once
    cuda.Stream = _Stream
    cuda.Event = _Stream
    cuda.current_stream = lambda device=None: _Stream()
    cuda.default_stream = lambda device=None: _Stream()
    cuda.stream = _on_stream
    # names of what runs, for a profiler of GPUs
    cuda.nvtx.range_push = _nothing()
    cuda.nvtx.range_pop = _nothing()


def _redirect_training_loop() -> None:
    """Answer the GPU queries of `megatron.training` before and between its iterations."""
    cuda: Any = torch.cuda
    # it refuses to start without them
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = _nothing()
    cuda.get_device_capability = lambda device=None: (0, 0)
    cuda.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=os.cpu_count()
    )
    _redirect_reports()
    # data loaders would pin their memory for it
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    _use_compiled_dataset_helpers()
    redirect_adam()
    from megatron_zb.megatron_core.versions import skip_fused_kernels

    skip_fused_kernels()


def _redirect_reports() -> None:
    """Redirect device statistics: logs and profilers read zeros."""
    cuda: Any = torch.cuda
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda device=None: 0)
        setattr(cuda, f"max_{name}", lambda device=None: 0)
    for name in ("device_memory_used", "temperature", "power_draw", "utilization", "clock_rate"):
        setattr(cuda, name, lambda device=None: 0)
    cuda.memory_stats = lambda device=None: Counter()  # 0, whatever the name
    cuda.reset_peak_memory_stats = _nothing()
    cuda.empty_cache = _nothing()
    cuda.memory._snapshot = lambda device=None: {"segments": [], "device_traces": []}
    cuda.memory._record_memory_history = _nothing()
    bindings: Any = torch._C
    bindings._cuda_attach_out_of_memory_observer = _nothing()
    cuda.cudart = lambda: SimpleNamespace(cudaProfilerStart=int, cudaProfilerStop=int)
    cuda.check_error = _nothing()
    profiler: Any = torch.autograd.profiler
    profiler.emit_nvtx = lambda enabled=True, record_shapes=False: contextlib.nullcontext()


def share_norms() -> None:
    """Let torch's norms run beside sequence parallelism; imports megatron-core.

    Each rank normalises its part of the sequence, so that the gradients of a norm are summed over
    the tensor-parallel ranks, as Megatron does for weights that are marked so.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def marked(cls: Any, config: Any, *args: Any, **keywords: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = build(cls, plain, *args, **keywords)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = marked


def redirect_experts() -> None:
    """Let experts run without a GPU and without Transformer-Engine; imports megatron-core."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu  # leaves tensors that are no CUDA tensors
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 asks for it, but does not define it then
        moe_utils.te_general_gemm = None


def redirect_predictions() -> None:
    """Let multi-token prediction be built without Transformer-Engine; imports megatron-core.

    After 0.19 it asks whether its layers are those for inference over Transformer-Engine's, whose
    classes are mocks where Transformer-Engine cannot be imported: then no layer is one.
    """
    from megatron.core.transformer import multi_token_prediction

    name = "is_inference_column_parallel_linear"
    if hasattr(multi_token_prediction, name):
        from megatron.core.tensor_parallel import inference_layers

        if not isinstance(inference_layers.InferenceColumnParallelLinear, type):
            setattr(multi_token_prediction, name, lambda module: False)


def sum_norms_in_single_precision() -> None:
    """Sum norms of 16-bit weights in 32 bits, as a GPU's kernels do; imports megatron-core.

    Megatron's substitute for them rounds the norm of every tensor, and that of a rank, to the type
    of the weights, so that ``--log-params-norm`` would differ between placements.
    """
    from megatron.core import utils

    usual = utils.local_multi_tensor_l2_norm
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def of_single_precision(chunk: Any, flag: Any, lists: Any, *options: Any) -> Any:
        return usual(chunk, flag, [[each.float() for each in of] for of in lists], *options)

    utils.local_multi_tensor_l2_norm = of_single_precision


def keep_messages() -> None:
    """Keep what Megatron's own schedules send in memory until it is sent; imports megatron-core.

    Interleaved 1F1B gives an activation away right after it has begun to send it. A stream of a GPU
    keeps it; gloo would read memory that has something else in it by then.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    usual = p2p_communication._p2p_ops
    if hasattr(usual, "__wrapped__"):
        return

    @functools.wraps(usual)
    def on_aliases(**options: Any) -> Any:
        for name in ("tensor_send_prev", "tensor_send_next"):
            if options[name] is not None:
                options[name] = options[name].detach()  # keeps the memory, whatever the other does
        return usual(**options)

    p2p_communication._p2p_ops = on_aliases


def _use_compiled_dataset_helpers() -> None:
    """Take the data set helpers of an installed megatron-core, so that no compiler is needed."""
    try:
        files = distribution("megatron-core").files or []
    except PackageNotFoundError:
        return
    name = "megatron.core.datasets.helpers_cpp"
    compiled = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    for file in files:
        if file.name == compiled and (spec := spec_from_file_location(name, file.locate())):
            from megatron.core.datasets import utils

            module = module_from_spec(spec)
            assert spec.loader is not None
            spec.loader.exec_module(module)
            sys.modules[name] = module
            utils.compile_helpers = _nothing()


def redirect_adam() -> None:
    """Adapt torch's Adam to Megatron's distributed optimizer, which expects a GPU's fused one.

    Megatron asks a fresh optimizer for its state before it loads a checkpoint into it, but torch's
    makes it at the first step; and it takes every entry of a parameter's state for a tensor of the
    parameter's shape, so the number of steps has to be kept with the group. An optimizer without
    parameters, such as that of experts on a rank that holds none, also has to have steps.
    """
    optim: Any = torch.optim

    class AdamW(torch.optim.AdamW):
        def _steps_to_parameters(self) -> None:
            for group in self.param_groups:
                steps = float(group.get("step", 0))
                for parameter in group["params"]:
                    if self.state[parameter]:  # a step that a resume has set there counts
                        self.state[parameter].setdefault("step", torch.tensor(steps))

        def _steps_to_groups(self) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    step = self.state[parameter].pop("step", None)
                    if step is not None:
                        group["step"] = int(step)

        def step(self, closure: Any = None) -> Any:
            self._steps_to_parameters()
            loss = super().step(closure)
            self._steps_to_groups()
            for group in self.param_groups:
                if not group["params"]:
                    group["step"] = group.get("step", 0) + 1
            return loss

        def state_dict(self) -> dict[str, Any]:
            for group in self.param_groups:
                for parameter in group["params"]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter].setdefault(name, torch.zeros_like(parameter))
            self._steps_to_parameters()
            state: dict[str, Any] = super().state_dict()
            state["state"] = {key: dict(value) for key, value in state["state"].items()}
            if not state["state"]:
                step = max(group.get("step", 0) for group in self.param_groups)
                state["state"] = {0: {"step": torch.tensor(float(step))}}
            self._steps_to_groups()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            # Megatron stores no number of steps while it is 0, as where fp16 skips the first ones
            states = {
                key: {"step": torch.tensor(0.0), **state} if state else state
                for key, state in state_dict["state"].items()
            }
            super().load_state_dict({**state_dict, "state": states})
            self._steps_to_groups()

    optim.AdamW = AdamW


def _redirect_factories() -> None:
    """Let `torch.zeros(..., device="cuda")` and similar functions create the tensor on the CPU."""
    for name in _FACTORIES:
        setattr(torch, name, _with_device_on_cpu(getattr(torch, name)))


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def create(*args: Any, **kwargs: Any) -> Any:
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # for copies to a GPU
        return function(*args, **kwargs)

    return create


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_tensor_methods() -> None:
    """Let a move to CUDA leave a tensor where it is, and report its type by the CUDA name."""
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.record_stream = _nothing()
    move, name_type = tensor.to, tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and _means_cuda(args[0]):
            args = (_CPU, *args[1:])
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        result: torch.Tensor = move(self, *args, **kwargs)
        return result

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = name_type(self, *args, **kwargs)
        # the optimizers sort parameters by the names torch.cuda.FloatTensor, HalfTensor, ...
        return answer.replace("torch.", "torch.cuda.") if isinstance(answer, str) else answer

    tensor.to = to
    tensor.type = type_


def _redirect_random_state() -> None:
    """Use the CPU's random generator as CUDA's."""
    cuda: Any = torch.cuda
    cuda.manual_seed = torch.manual_seed
    cuda.initial_seed = torch.initial_seed
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda new_state, device=None: torch.set_rng_state(new_state)

    # megatron-core reaches past torch.cuda into the generator of the device
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> Any:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # it compares the CPU's generator with CUDA's, which are one here, and warns in every forward
    logging.getLogger(megatron_random.__name__).addFilter(_has_another_message)


def _has_another_message(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed within GPU RNG context")


class _Stream:
    """A CUDA stream or event on a device that executes every call synchronously."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record_event(self, _event: Any = None) -> _Stream:
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing()


@contextlib.contextmanager
def _on_stream(stream: Any) -> Iterator[None]:
    yield


def _nothing() -> Callable[..., None]:
    """Return a new no-op function; torch's compiler needs each to be a distinct object."""

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    return nothing
