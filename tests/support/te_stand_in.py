"""Transformer-Engine's Python modules on the CPU, over stand-ins for its CUDA kernels.

The modules, with their backwards and their stores for weight gradients, are Transformer-Engine's
own. What stands in, because no CPU can run it, is its extension ``transformer_engine_torch``: the
matrix products and norms below do the same sums in plain torch, those that quantise are in
``te_quantization``, and whatever else the extension has can be named but not called. So nothing
here tells how fast a kernel is, or whether it is right.

Rank processes install it when asked to: ``ranks(2, Kind.TRANSFORMER_ENGINE)``.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import te_quantization
import torch
from packaging.version import Version


def install() -> None:
    """Import Transformer-Engine over the stand-ins, before anything imports megatron.

    It is the one on the path; of an older one, no reference of a quantised format is mended.
    """
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # its libraries are not loaded
    os.environ["NVTE_TORCH_COMPILE"] = "0"
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # scales follow from maxima in Python
    sys.modules["transformer_engine_torch"] = extension = _extension()
    sys.modules["transformer_engine.pytorch.onnx_extensions"] = _Stub("onnx_extensions")
    with warnings.catch_warnings():  # that its extension is not installed
        warnings.simplefilter("ignore", RuntimeWarning)
        import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    with _without_triton():
        from transformer_engine.pytorch import cpp_extensions
    cpp_extensions.__getattr__ = extension.__getattr__  # import * takes what is there only
    cpp_extensions.gemm.get_cublas_workspace_size_bytes = lambda: 1
    if find_spec("transformer_engine.pytorch.custom_recipes.reference_nvfp4") is not None:
        te_quantization.mend_references()
    te_quantization.read_on_the_cpu()
    te_quantization.gather_one_by_one()
    _accept_every_format()
    _draw_on_the_cpu()
    torch.cuda.is_current_stream_capturing = lambda: False
    _accept_tensors_on_the_cpu()


def _extension() -> ModuleType:
    extension: Any = _Stub("transformer_engine_torch")
    extension.DType = _DType
    is_older = Version(version("transformer-engine")) < Version("2.15")
    backends = _OLDER_BACKENDS if is_older else _BACKENDS
    make: Any = IntEnum
    extension.NVTE_Fused_Attn_Backend = make("NVTE_Fused_Attn_Backend", backends)
    extension.FP8FwdTensors = _numbered(_FORWARD)
    extension.FP8BwdTensors = _numbered(_BACKWARD)
    for kernel in _KERNELS + te_quantization.KERNELS:
        setattr(extension, kernel.__name__, torch.no_grad()(kernel))
    extension.get_num_cublas_streams = lambda: 1
    return extension


class _DType(IntEnum):
    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
_OLDER_BACKENDS = {**_BACKENDS, "NVTE_F16_max512_seqlen": 0}


# Each tensor of a module has a quantizer of its own, by these numbers.
_FORWARD = [f"GEMM{i}_{name}" for i in (1, 2, 3) for name in ("INPUT", "WEIGHT", "OUTPUT")]
_BACKWARD = [f"GRAD_{name}{i}" for i in (1, 2, 3) for name in ("OUTPUT", "INPUT")]


def _numbered(names: list[str]) -> SimpleNamespace:
    return SimpleNamespace(**{name: number for number, name in enumerate(names)})


_TORCH_TYPES = {
    _DType.kFloat32: torch.float32,
    _DType.kFloat16: torch.float16,
    _DType.kBFloat16: torch.bfloat16,
}


class _Name:
    """Something that is not there: it can be named, and asked for its number."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(self)(f"{self._name}.{name}")

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in")

    def __int__(self) -> int:
        return 0


class _Decorator(_Name):
    """What turns Triton's kernels into something that is never called."""

    def __call__(self, *_args: Any, **_options: Any) -> Any:
        return self


class _Stub(ModuleType):
    def __init__(self, name: str, kind: type[_Name] = _Name) -> None:
        super().__init__(name)
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._kind(f"{self.__name__}.{name}")


@contextmanager
def _without_triton() -> Iterator[None]:
    """Triton is a gigabyte, and its kernels are for GPUs: they are defined, and never called."""
    import torch._dynamo  # noqa: F401  # asks for triton, and must not find the stub

    names = ["triton", "triton.language", "triton.language.core", "triton.language.standard"]
    before = {name: sys.modules.pop(name, None) for name in names}
    sys.modules.update({name: _Stub(name, _Decorator) for name in names})
    sys.modules["triton"].__version__ = "3.5.0"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _accept_every_format() -> None:
    """Recipes ask the device for its capability."""
    from transformer_engine.pytorch import quantization

    for kind in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling"):
        setattr(quantization, f"check_{kind}_support", te_quantization.available)


def _draw_on_the_cpu() -> None:
    """Recomputation saves and restores the state of the GPU's random generator."""
    from transformer_engine.pytorch import distributed

    distributed._get_cuda_rng_state = lambda *_, **_options: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **_options: torch.set_rng_state(state)


def _accept_tensors_on_the_cpu() -> None:
    """Modules ask whether their input is on a GPU."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule as Base

    Base.prepare_forward = as_if_on_a_gpu(Base.prepare_forward)


def as_if_on_a_gpu(method: Callable[..., Any]) -> Callable[..., Any]:
    tensor: Any = torch.Tensor

    def run(self: Any, *args: Any, **options: Any) -> Any:
        if "is_cuda" in vars(tensor):  # called by another such method
            return method(self, *args, **options)
        tensor.is_cuda = True
        try:
            return method(self, *args, **options)
        finally:
            del tensor.is_cuda

    return run


def _product(a: torch.Tensor, transposed_a: bool, b: torch.Tensor, transposed_b: bool) -> Any:
    """What the GEMM kernels compute, in their order of operands; what is quantised is read."""
    a = te_quantization.values_of(a, columnwise=not transposed_a).flatten(0, -2)
    b = te_quantization.values_of(b, columnwise=transposed_b).flatten(0, -2)
    return (b.t() if transposed_b else b) @ (a.t() if transposed_a else a)


def _product_in_python(
    a: Any, transposed_a: bool, b: Any, transposed_b: bool, dtype: torch.dtype
) -> Any:
    """The product of a reference recipe, for one expert."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    layout = ("T" if transposed_a else "N") + ("T" if transposed_b else "N")
    return general_gemm(a, b, out_dtype=dtype, layout=layout, grad=layout != "TN")[0]


def _write(out: torch.Tensor, product: torch.Tensor, add: bool) -> None:
    out.add_(product) if add else out.copy_(product)


def generic_gemm(
    a: torch.Tensor,
    transposed_a: bool,
    b: torch.Tensor,
    transposed_b: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    out_type: Any,
    bias: torch.Tensor | None,
    _bias_type: Any,
    gelu: bool,
    _gelu_input: Any,
    grad: bool,
    _workspace: Any,
    _workspace_size: int,
    add: bool,
    _split_accumulator: bool,
    **_overlap: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
    """One matrix product; in a weight gradient (``grad``) it brings the bias's gradient, too."""
    if gelu:
        raise NotImplementedError("a matrix product with a fused gelu has no stand-in")
    product = _product(a, transposed_a, b, transposed_b)
    bias_gradient = None
    if bias is not None and grad:
        bias_gradient = b.flatten(0, -2).sum(0).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    if out is not None:
        _write(out, product, add)
        return out, bias_gradient, None, None
    leading = () if transposed_b else b.shape[:-1]
    shape = (*leading, product.size(-1)) if leading else product.shape
    dtype = product.dtype if out_type is None else _TORCH_TYPES[_DType(int(out_type))]
    product = product.to(dtype).view(shape)
    return product if quantizer is None else quantizer(product), bias_gradient, None, None


def te_general_grouped_gemm(
    a: list[torch.Tensor],
    transposed_a: bool,
    b: list[torch.Tensor],
    transposed_b: bool,
    out: list[torch.Tensor],
    _out_type: Any,
    splits: list[int],
    biases: list[torch.Tensor],
    _bias_type: Any,
    single_output: bool,
    _gelu_input: Any,
    grad: bool,
    _workspaces: Any,
    _workspace_size: int,
    add: bool,
    *_options: Any,
) -> list[torch.Tensor]:
    """A matrix product for each expert."""
    outputs = list(out[0].split(list(splits))) if single_output else out
    for one_a, one_b, one_out, bias in zip(a, b, outputs, biases, strict=True):
        if getattr(one_a, "custom", False):
            product = _product_in_python(one_a, transposed_a, one_b, transposed_b, one_out.dtype)
        else:
            product = _product(one_a, transposed_a, one_b, transposed_b)
        if bias.numel() and grad:
            bias.copy_(one_b.sum(0))
        elif bias.numel():
            product = product + bias
        _write(one_out, product, add)
    return biases


def layernorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    _out: Any,
    quantizer: Any,
    _out_type: Any,
    _margin: int,
    zero_centered: bool,
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    scale = (weight + 1 if zero_centered else weight).float()
    mean = x.float().mean(-1)
    deviation = (x.float().var(-1, correction=0) + eps).rsqrt()
    normal = (x.float() - mean[..., None]) * deviation[..., None]
    return _quantized((normal * scale + bias.float()).to(x.dtype), quantizer), mean, deviation


def layernorm_bwd(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    _margin: int,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient, scale = gradient.float(), (weight + 1 if zero_centered else weight).float()
    normal = (x.float() - mean[..., None]) * deviation[..., None]
    scaled = gradient * scale
    centred = scaled - scaled.mean(-1, keepdim=True)
    d_x = deviation[..., None] * (centred - normal * (scaled * normal).mean(-1, keepdim=True))
    d_weight = (gradient * normal).flatten(0, -2).sum(0)
    d_bias = gradient.flatten(0, -2).sum(0)
    return d_x.to(x.dtype), d_weight.to(weight.dtype), d_bias.to(weight.dtype)


def rmsnorm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    _out: Any,
    quantizer: Any,
    _out_type: Any,
    _margin: int,
    zero_centered: bool,
) -> tuple[Any, None, torch.Tensor]:
    scale = (weight + 1 if zero_centered else weight).float()
    deviation = (x.float().square().mean(-1) + eps).rsqrt()
    result = (x.float() * deviation[..., None] * scale).to(x.dtype)
    return _quantized(result, quantizer), None, deviation


def rmsnorm_bwd(
    gradient: torch.Tensor,
    x: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    _margin: int,
    zero_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, scale = gradient.float(), (weight + 1 if zero_centered else weight).float()
    normal = x.float() * deviation[..., None]
    scaled = gradient * scale
    d_x = deviation[..., None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return d_x.to(x.dtype), (gradient * normal).flatten(0, -2).sum(0).to(weight.dtype)


def relu(x: torch.Tensor, quantizer: Any) -> Any:
    return _quantized(x.relu(), quantizer)


def drelu(gradient: torch.Tensor, x: torch.Tensor, quantizer: Any) -> Any:
    return _quantized(gradient * (x > 0), quantizer)


def dbias_drelu(gradient: torch.Tensor, x: torch.Tensor, quantizer: Any) -> tuple[Any, Any]:
    return te_quantization.bgrad_quantize(gradient * (x > 0), quantizer)


def scaled_swiglu(
    x: torch.Tensor, scales: torch.Tensor, quantizer: Any, interleaved: int
) -> torch.Tensor:
    """The activation between the operations of experts, with the probability of each token."""
    if interleaved:
        raise NotImplementedError("an interleaved SwiGLU has no stand-in")
    gate, up = x.chunk(2, dim=-1)
    return _quantized(torch.nn.functional.silu(gate) * up * scales[..., None], quantizer)


def scaled_dswiglu(
    gradient: torch.Tensor,
    x: torch.Tensor,
    scales: torch.Tensor,
    quantizer: Any,
    interleaved: int,
    _of_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        x, scales = x.detach().requires_grad_(), scales.detach().requires_grad_()
        output = scaled_swiglu(x, scales, None, interleaved)
        d_x, d_scales = torch.autograd.grad(output, (x, scales), gradient)
    return _quantized(d_x, quantizer), d_scales


def _quantized(result: torch.Tensor, quantizer: Any) -> Any:
    """Kernels quantise what they have computed, if they are given a quantizer."""
    return result if quantizer is None else quantizer(result)


def multi_tensor_l2norm(
    _chunk: int, _overflow: Any, tensors: list[list[torch.Tensor]], *_each: Any
) -> tuple[torch.Tensor, None]:
    """The norm of all gradients."""
    return torch.stack([one.float().norm() for one in tensors[0]]).norm(), None


def multi_tensor_scale_tensor(
    _chunk: int, _overflow: Any, tensors: list[list[torch.Tensor]], scale: torch.Tensor
) -> None:
    """Clip gradients."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)


_KERNELS: list[Callable[..., Any]] = [
    generic_gemm,
    te_general_grouped_gemm,
    layernorm_fwd,
    layernorm_bwd,
    rmsnorm_fwd,
    rmsnorm_bwd,
    relu,
    drelu,
    dbias_drelu,
    scaled_swiglu,
    scaled_dswiglu,
    multi_tensor_l2norm,
    multi_tensor_scale_tensor,
]
