"""Stand-ins for Transformer-Engine's kernels that quantise, and for products of quantised tensors.

Its classes for quantised tensors, its quantizers and its recipes are Transformer-Engine's own:
per-tensor fp8 with delayed and with current scaling, blockwise fp8 and mxfp8. What a kernel does on
a GPU is done here in plain torch: values are scaled and rounded to eight bits, and a product is
that of the values read back. So these show what is quantised, when, and what is kept for whom; they
cannot show that a GPU's kernels compute the same.

Recipes that Transformer-Engine has in pure Python (``custom_recipes``) run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad


def available() -> tuple[bool, str]:
    """Say that the device knows every format; TE asks for the reason if it does not."""
    return True, ""


def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, skip: torch.Tensor | None = None
) -> Any:
    """Quantise into ``output``, or into a new tensor of the quantizer's own class.

    Where ``skip`` is 1, nothing changes. It is read on the device, as a graph has to.
    """
    if output is None:
        output = create_empty_quantized_tensor(quantizer, tensor.shape, tensor.dtype)
    values = tensor.detach().float()
    if skip is None:
        _quantize(values, quantizer, output)
        return output
    written = (*vars(output).values(), getattr(quantizer, "amax", None))
    before = [(one, one.clone()) for one in written if isinstance(one, torch.Tensor)]
    _quantize(values, quantizer, output)
    for buffer, old in before:
        buffer.copy_(torch.where(skip.eq(1), old, buffer))
    return output


def _quantize(values: torch.Tensor, quantizer: Any, output: Any) -> None:
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    if hasattr(output, "_scale_inv"):
        if isinstance(quantizer, Float8Quantizer):  # delayed: by the maxima of earlier tensors
            quantizer.amax.copy_(torch.maximum(quantizer.amax, values.abs().max()))
            scale = quantizer.scale.clone()
        else:
            scale = _current_scale(values, quantizer)
        _fill_per_tensor(output, values * scale)
        output._scale_inv.copy_(scale.reciprocal())
    else:
        _fill_blocks(output, values)


def create_empty_quantized_tensor(
    quantizer: Any, sizes: Sequence[int], dtype: torch.dtype, *_device: Any
) -> Any:
    """Allocate what the quantizer's kernel writes to."""
    from transformer_engine.pytorch.tensor.float8_tensor import (
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        Float8Tensor,
        Float8TensorStorage,
    )

    shape, buffers = torch.Size(sizes), dict[str, Any]()
    if isinstance(quantizer, Float8Quantizer | Float8CurrentScalingQuantizer):
        kind: Any = Float8TensorStorage if quantizer.internal else Float8Tensor
        others = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": dtype}
        rows, columns = quantizer.rowwise_usage, quantizer.columnwise_usage
        turned = (shape[-1], *shape[:-1])
        buffers["data"] = torch.empty(shape, dtype=torch.uint8) if rows else None
        buffers["data_transpose"] = torch.empty(turned, dtype=torch.uint8) if columns else None
        buffers["fp8_scale_inv"] = torch.empty(1)
    else:
        made = quantizer.storage_metadata(dtype)
        kind, others = made["cls"], dict(made["nontensor_kwargs"])
        if "with_gemm_swizzled_scales" in others:
            others["with_gemm_swizzled_scales"] = False  # in the order of the blocks
        allocated = quantizer.alloc_tensors(shape, device="cpu")
        for way in ("rowwise", "columnwise"):
            for part in ("data", "scale_inv"):
                buffers[f"{way}_{part}"] = allocated.get(f"_{way}_{part}")
    if not quantizer.internal:
        others |= {"shape": shape, "dtype": others.pop("fake_dtype"), "device": "cpu"}
    return kind(**buffers, **others)


def _fp8(dtype: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    found: torch.dtype = TE_DType_To_Torch[dtype]
    return found


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return values.clamp(-most, most).to(dtype).view(torch.uint8)


def _current_scale(values: torch.Tensor, quantizer: Any) -> torch.Tensor:
    largest = values.abs().max().view(1) if values.numel() else torch.zeros(1)
    if quantizer.with_amax_reduction:
        group = quantizer.amax_reduction_group
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    scale = torch.finfo(_fp8(quantizer.dtype)).max / largest
    return torch.where(largest > 0, scale, torch.ones(1))


def _fill_per_tensor(output: Any, scaled: torch.Tensor) -> None:
    rounded = _rounded(scaled, _fp8(output._fp8_dtype))
    if output._data is not None:
        output._data.copy_(rounded)
    if output._transpose is not None:
        output._transpose.copy_(rounded.movedim(-1, 0))
        output._transpose_invalid = False


class _Blocks(NamedTuple):
    """Rows and columns that share a scale, and whether column-wise data lies transposed."""

    rowwise: tuple[int, int]
    columnwise: tuple[int, int]
    transposed: bool


def _blocks(tensor: Any) -> _Blocks:
    if not hasattr(tensor, "_is_2D_scaled"):  # mxfp8
        return _Blocks((1, 32), (32, 1), transposed=False)
    side = (128, 128) if tensor._is_2D_scaled else (1, 128)
    return _Blocks(side, side, transposed=True)


def _fill_blocks(output: Any, values: torch.Tensor) -> None:
    matrix, blocks = values.reshape(-1, values.size(-1)), _blocks(output)
    if output._rowwise_data is not None:
        _fill(output, "_rowwise", matrix, blocks.rowwise)
    if output._columnwise_data is not None:
        turned = matrix.t() if blocks.transposed else matrix
        _fill(output, "_columnwise", turned, blocks.columnwise)


def _fill(output: Any, way: str, matrix: torch.Tensor, block: tuple[int, int]) -> None:
    dtype = _fp8(output._fp8_dtype)
    exponents = (torch.finfo(dtype).max / _largest(matrix, block)).log2().floor()
    data, scales = getattr(output, f"{way}_data"), getattr(output, f"{way}_scale_inv")
    rounded = _rounded(matrix * _spread(exponents.exp2(), matrix, block), dtype)
    data.copy_(rounded.view(data.shape))
    in_bits = scales.dtype is torch.uint8  # mxfp8 keeps exponents alone
    _used(scales, exponents.shape).copy_(127 - exponents if in_bits else (-exponents).exp2())


def _used(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """What is used of a buffer of scales; it is padded, and in blockwise fp8 may lie transposed."""
    rows, columns = shape
    if rows <= scales.size(0) and columns <= scales.size(1):
        return scales[:rows, :columns]
    return scales[:columns, :rows].t()


def _largest(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    rows, columns = (-size % side for size, side in zip(matrix.shape, block, strict=True))
    padded = pad(matrix.abs(), (0, columns, 0, rows))
    tiles = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return tiles.amax((1, 3)).clamp_min(1e-20)


def _spread(scales: torch.Tensor, like: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: like.size(0), : like.size(1)]


def values_of(operand: Any, columnwise: bool) -> torch.Tensor:
    """Read the values of an operand that a product takes by its columns, or by its rows."""
    if hasattr(operand, "_scale_inv"):
        kept = operand._transpose if columnwise else operand._data
        values = kept.view(_fp8(operand._fp8_dtype)).float() * operand._scale_inv
        return values.movedim(0, -1) if columnwise else values
    if not hasattr(operand, "_rowwise_data"):
        return operand  # not quantised
    way = "_columnwise" if columnwise else "_rowwise"
    blocks = _blocks(operand)
    data = getattr(operand, f"{way}_data")
    turned = columnwise and blocks.transposed
    matrix = data.view(data.size(0), -1) if turned else data.view(-1, data.size(-1))
    block = blocks.columnwise if columnwise else blocks.rowwise
    count = torch.Size(-(-size // side) for size, side in zip(matrix.shape, block, strict=True))
    scales = _used(getattr(operand, f"{way}_scale_inv"), count)
    inverse = (scales.float() - 127).exp2() if scales.dtype is torch.uint8 else scales
    values = matrix.view(_fp8(operand._fp8_dtype)).float() * _spread(inverse, matrix, block)
    return values.t() if turned else values.view(data.shape)


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    rows = getattr(tensor, "_data", None)
    rows = getattr(tensor, "_rowwise_data", None) if rows is None else rows
    return values_of(tensor, columnwise=rows is None).to(TE_DType_To_Torch[dtype])


def read_on_the_cpu() -> None:
    """TE reads mxfp8 on a GPU alone."""
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.tensor.storage import mxfp8_tensor_storage as mxfp8

    def forward(_: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(tensor, TE_DType[dtype])

    reader: Any = mxfp8._FromMXFP8Func
    reader.forward = forward


def bgrad_quantize(gradient: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """The gradient of a bias, and the quantised gradient of the output."""
    return gradient.flatten(0, -2).sum(0), quantizer(gradient)


def split_quantize(
    tensor: torch.Tensor, splits: list[int], quantizers: list[Any], **_options: Any
) -> list[Any]:
    """One quantised tensor for each expert."""
    parts = tensor.flatten(0, -2).split(list(splits))
    return [quantizer(part) for part, quantizer in zip(parts, quantizers, strict=True)]


def fp8_transpose(data: torch.Tensor, _dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
    turned = data.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned)


def swap_first_dims(tensor: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(tensor.transpose(0, 1))


def fused_multi_row_padding(
    rows: torch.Tensor, output: torch.Tensor, counts: list[int], padded: list[int]
) -> None:
    """Pad the tokens of every expert with zeros."""
    output.zero_()
    for there, here in zip(output.split(list(padded)), rows.split(list(counts)), strict=True):
        there[: here.size(0)] = here


def fused_multi_row_unpadding(
    rows: torch.Tensor, output: torch.Tensor, padded: list[int], counts: list[int]
) -> None:
    for there, here in zip(output.split(list(counts)), rows.split(list(padded)), strict=True):
        there.copy_(here[: there.size(0)])


def gather_one_by_one() -> None:
    """TE gathers data and scales in one go, which gloo cannot."""
    from transformer_engine.pytorch import distributed

    def apart(gather: Any, *args: Any, **options: Any) -> Any:
        collectives: Any = torch.distributed
        usual = collectives._coalescing_manager
        done = SimpleNamespace(wait=lambda: None)
        collectives._coalescing_manager = lambda **_: nullcontext(done)
        try:
            return gather(*args, **options)
        finally:
            collectives._coalescing_manager = usual

    for name in ("_all_gather_mxfp8", "_start_all_gather_fp8_blockwise"):
        setattr(distributed, name, partial(apart, getattr(distributed, name)))


def mend_references() -> None:
    """Let the pure-Python recipes do what TE's modules ask of its kernels.

    Their product ignores ``out``, and in nvfp4 refuses a bias; one module does not tell it that it
    computes a gradient; and the size of an nvfp4 tensor is that of all dimensions.
    """
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4TensorRef

    product, size = gemm.custom_gemm, NVFP4TensorRef.size

    def custom_gemm(a: Any, b: Any, workspace: Any, dtype: Any, quantizer: Any, *rest: Any) -> Any:
        _gelu, _gelu_in, add, layout, out, bias, *_ = rest
        gradient = layout != "TN"
        options = {"out_dtype": dtype, "layout": layout, "grad": gradient}
        result = product(a, b, workspace, quantization_params=quantizer, **options)[0]
        if bias is not None and bias.numel() and not gradient:
            result = result + bias.to(result.dtype)
        if out is not None:
            result = out.add_(result) if add else out.copy_(result)
        return result, None, None, None

    gemm.custom_gemm = custom_gemm
    NVFP4TensorRef.size = lambda self, *dim: size(self)[dim[0]] if dim else size(self)


KERNELS: list[Callable[..., Any]] = [
    quantize,
    create_empty_quantized_tensor,
    dequantize,
    bgrad_quantize,
    split_quantize,
    fp8_transpose,
    swap_first_dims,
    fused_multi_row_padding,
    fused_multi_row_unpadding,
]
