"""Modules of Transformer-Engine in passes of a schedule, and the same in torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_zb.megatron_core.split_backward import SplitBackward
from megatron_zb.megatron_core.transformer_engine import (
    split_transformer_engine,
)
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.autograd_stage import WeightGradQueue

WIDTH, WIDER, TOKENS = 64, 128, 128  # blocks of 32 share a scale in mxfp8
SPLITS = [96, 32]  # of the tokens among the experts of GroupedLinear

DEFERRED = "F0 F1 F2 B0 B1 B2 W0 W1 W2"
WHOLE = "F0 F1 F2 BW0 BW1 BW2"
MIXED = "F0 F1 F2 B0 BW1 W0 B2 W2"
NO_W_YET = "F0 F1 F2 B0 B1 B2"


@dataclass(frozen=True)
class Case:
    """One module, and who takes its gradients: autograd, a main_grad, or Megatron's DDP.

    ``recipe`` is how it quantises, one of :data:`RECIPES`, with its weights if ``quantized``.
    """

    kind: str
    dtype: torch.dtype = torch.float32
    fused: bool = False
    takes: str = "autograd"  # or main_grad, ddp, overlapping-ddp
    options: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()
    recipe: str | None = None
    quantized: bool = False

    @property
    def ranks(self) -> int:
        """Over which the module is tensor- and sequence-parallel."""
        return 2 if dict(self.options).get("sequence_parallel") else 1


def build(case: Case) -> Any:
    from transformer_engine import pytorch as te

    options = {"params_dtype": case.dtype, "device": "cpu", **dict(case.options)}
    options["fuse_wgrad_accumulation"] = case.fused
    torch.manual_seed(1)
    if case.ranks > 1:
        torch.manual_seed(1 + dist.get_rank())
        options |= {"tp_group": dist.group.WORLD, "tp_size": case.ranks}
    if case.kind == "TEColumnParallelLinear":
        return build_megatrons(case)
    if case.kind == "GroupedLinear":
        return te.GroupedLinear(len(SPLITS), WIDTH, WIDER, **options)
    name, _, activation = case.kind.partition("-")
    if activation:
        options["activation"] = activation
    return getattr(te, name)(WIDTH, WIDER, **options)


def build_megatrons(case: Case, tensor_parallel: int = 1, **options: Any) -> Any:
    """Megatron's layer over te.Linear."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    enter_groups(tensor_parallel)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        num_attention_heads=tensor_parallel,
        tensor_model_parallel_size=tensor_parallel,
        gradient_accumulation_fusion=case.fused,
        use_cpu_initialization=True,
        params_dtype=case.dtype,
        **options,
    )
    return TEColumnParallelLinear(
        WIDTH,
        WIDER,
        config=config,
        init_method=torch.nn.init.normal_,
        gather_output=False,
        bias=True,
        skip_bias_add=False,
        is_expert=False,
    )


RECIPES = ["delayed", "current", "blockwise", "mxfp8", "current-reference", "nvfp4-reference"]


def recipe(name: str) -> Any:
    """One of TE's recipes; a reference is in pure Python, the others' kernels have stand-ins."""
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch.custom_recipes import reference_current_scaling as current
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4 as nvfp4

    made: dict[str, Callable[[], Any]] = {
        "delayed": lambda: recipes.DelayedScaling(amax_history_len=3, amax_compute_algo="max"),
        "current": recipes.Float8CurrentScaling,
        "blockwise": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "current-reference": lambda: recipes.CustomRecipe(current.current_scaling_ref_factory),
        "nvfp4-reference": lambda: recipes.CustomRecipe(nvfp4.nvfp4_ref_rht_2d_factory),
    }
    return made[name]()


def enter_groups(tensor_parallel: int = 1) -> None:
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, create_gloo_process_groups=False
        )


def in_torch(case: Case, p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What the module computes, in plain torch."""
    if case.kind == "GroupedLinear":
        parts = enumerate(x.split(SPLITS))
        return torch.cat([functional.linear(t, p[f"weight{i}"], p[f"bias{i}"]) for i, t in parts])
    if case.kind.startswith("LayerNorm"):
        x = functional.layer_norm(x, (WIDTH,), p["layer_norm_weight"], p["layer_norm_bias"])
    if case.kind.startswith("LayerNormMLP"):
        x = functional.linear(x, p["fc1_weight"], p["fc1_bias"])
        x = x.relu() if case.kind.endswith("relu") else functional.gelu(x, approximate="tanh")
        return functional.linear(x, p["fc2_weight"], p["fc2_bias"])
    if "a_weight" in p:  # parameters_split
        p = {name: torch.cat([p[f"a_{name}"], p[f"b_{name}"]]) for name in ("weight", "bias")}
    return functional.linear(x, p["weight"], p.get("bias"))


class Run:
    """One module with its queue, run as the runtime would."""

    def __init__(self, case: Case) -> None:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reset()
        self.case = case
        self.recipe = None if case.recipe is None else recipe(case.recipe)
        with self.with_quantized_weights():
            self.module = build(case)
        self.queue = WeightGradQueue()
        self.queue.activation_memory = self.memory = ActivationMemory()
        overlaps = case.takes == "overlapping-ddp"
        self.split = split = SplitBackward(self.queue, hooks_need_gradients=overlaps)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad = name not in case.frozen
        chunk = torch.nn.ModuleDict({"layer": self.module})
        split_transformer_engine(chunk, split, "v-half")
        self.no_sync = take_gradients(case, chunk)
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    def with_quantized_weights(self) -> Any:
        from transformer_engine import pytorch as te

        quantized = te.quantized_model_init(recipe=self.recipe)
        return quantized if self.case.quantized else nullcontext()

    def quantizing(self) -> Any:
        """The context of a forward."""
        from transformer_engine import pytorch as te

        return nullcontext() if self.recipe is None else te.autocast(recipe=self.recipe)

    def run(self, passes: str) -> Run:
        with self.no_sync():
            for one in passes.split():
                getattr(self, one[:-1])(int(one[-1]))
        return self

    def F(self, microbatch: int) -> None:
        self.inputs[microbatch] = x = microbatch_of(self.case, microbatch)
        more = [SPLITS] if self.case.kind == "GroupedLinear" else []
        with self.quantizing():
            self.outputs[microbatch] = self.module(x, *more)

    def BW(self, microbatch: int) -> None:
        loss(self.outputs.pop(microbatch)).backward()
        if self.case.takes == "main_grad":
            self.take_what_autograd_has()

    def take_what_autograd_has(self) -> None:
        """What Megatron's DDP does for every parameter."""
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.main_grad.add_(parameter.grad)
                parameter.grad = None

    def B(self, microbatch: int) -> None:
        with self.queue.collecting(microbatch):
            self.BW(microbatch)

    def W(self, microbatch: int) -> None:
        self.queue.run(microbatch)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the parameters, where the optimizer looks for them, and of the inputs."""
        found = {}
        for name, parameter in self.module.named_parameters():
            gradient = getattr(parameter, "main_grad", parameter.grad)
            found[name] = torch.zeros_like(parameter) if gradient is None else gradient.clone()
        return found | {f"input {m}": x.grad for m, x in self.inputs.items() if x.grad is not None}


def microbatch_of(case: Case, microbatch: int) -> torch.Tensor:
    seed = microbatch + 100 * (dist.get_rank() if case.ranks > 1 else 0)
    generator = torch.Generator().manual_seed(seed)
    tokens, width = TOKENS, WIDTH
    if ("parallel_mode", "row") in case.options:  # whole sequences of a part of the input
        tokens, width = TOKENS * case.ranks, WIDTH // case.ranks
    return torch.randn(tokens, width, generator=generator).to(case.dtype).requires_grad_()


def loss(output: Any) -> torch.Tensor:
    """``return_bias`` gives the bias apart, to be added by somebody else."""
    y, bias = output if isinstance(output, tuple) else (output, None)
    result: torch.Tensor = (y if bias is None else y + bias).float().square().sum()
    return result


def take_gradients(case: Case, chunk: torch.nn.Module) -> Callable[[], Any]:
    """Let the gradients be taken as the case says; what passes must run in comes back."""
    if case.takes == "main_grad":
        for parameter in chunk.parameters():
            parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
    if not case.takes.endswith("ddp"):
        return nullcontext
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    enter_groups()
    overlaps = case.takes.startswith("overlapping")
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlaps)
    no_sync: Callable[[], Any] = DistributedDataParallel(config, ddp, chunk).no_sync
    return no_sync


def gradients(case: Case, passes: str) -> dict[str, torch.Tensor]:
    """Run passes of a new module."""
    run = Run(case).run(passes)
    assert len(run.queue) == 0 or "W" not in passes
    return run.gradients()


def gradients_in_torch(case: Case, microbatches: int) -> dict[str, torch.Tensor]:
    p = {n: t.detach().clone().requires_grad_() for n, t in build(case).named_parameters()}
    inputs = {f"input {m}": microbatch_of(case, m) for m in range(microbatches)}
    for x in inputs.values():
        loss(in_torch(case, p, x)).backward()
    return {name: t.grad for name, t in (p | inputs).items() if t.grad is not None}


def unlike(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0
) -> list[str]:
    """What is not equal, relative to the largest gradient; bit for bit without a tolerance."""
    found = [f"{name} is missing" for name in expected.keys() - ours.keys()]
    for name in expected.keys() & ours.keys():
        off = (ours[name].float() - expected[name].float()).abs().max().item()
        if not off <= tolerance * expected[name].abs().max().item():
            found.append(f"{name} is off by {off}")
    return sorted(found)


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
TAKES = [
    (False, "autograd"),
    (False, "main_grad"),
    (False, "ddp"),
    (False, "overlapping-ddp"),
    (True, "main_grad"),
    (True, "ddp"),
    (True, "overlapping-ddp"),
]

# Over two ranks.
SHARED = {"sequence_parallel": True}
COLUMN, ROW = {"parallel_mode": "column", **SHARED}, {"parallel_mode": "row", **SHARED}
SEQUENCE_PARALLEL = [
    ("Linear", COLUMN),
    ("LayerNormLinear", COLUMN),
    ("Linear", ROW),
    ("LayerNormMLP-relu", {"set_parallel_mode": True, **SHARED}),
]
NAMES_OF_SEQUENCE_PARALLEL = ["column", "column-with-norm", "row", "mlp"]
