"""Transformer-Engine's own modules with their backward split, over stand-ins for its kernels."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import gpt_cases
import pytest
import torch
import torch.distributed as dist
from gpt_cases import GPTCase
from rank_process import TRANSFORMER_ENGINE, Kind
from ranks import RankPool, RankPools
from torch.nn import functional

from megatron_zb.errors import UsageError
from megatron_zb.megatron_core.linear import SplitBackward
from megatron_zb.megatron_core.transformer_engine import (
    WHY_NOT_OPERATIONS,
    split_transformer_engine,
)
from megatron_zb.megatron_core.versions import transformer_engine_is_supported
from megatron_zb.runtime.activation_memory import ActivationMemory
from megatron_zb.runtime.weight_grad import WeightGradQueue

WIDTH, WIDER, TOKENS = 8, 12, 6
SPLITS = [4, 2]  # of the tokens among the experts of GroupedLinear

DEFERRED = "F0 F1 F2 B0 B1 B2 W0 W1 W2"
WHOLE = "F0 F1 F2 BW0 BW1 BW2"
MIXED = "F0 F1 F2 B0 BW1 W0 B2 W2"
NO_W_YET = "F0 F1 F2 B0 B1 B2"


@pytest.fixture(scope="module")
def pool(ranks: RankPools) -> RankPool:
    if not (TRANSFORMER_ENGINE / "transformer_engine").is_dir():
        pytest.skip(f"TRANSFORMER-ENGINE IS NOT TESTED: it is not in {TRANSFORMER_ENGINE}")
    return ranks(2, Kind.TRANSFORMER_ENGINE)


@dataclass(frozen=True)
class Case:
    """One module, and who takes its gradients: autograd, a main_grad, or Megatron's DDP."""

    kind: str
    dtype: torch.dtype = torch.float32
    fused: bool = False
    takes: str = "autograd"  # or main_grad, ddp, overlapping-ddp
    options: tuple[tuple[str, Any], ...] = ()
    frozen: tuple[str, ...] = ()

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
        self.case = case
        self.module = build(case)
        self.queue = WeightGradQueue()
        self.queue.activation_memory = self.memory = ActivationMemory()
        split = SplitBackward(self.queue, hooks_need_gradients=case.takes == "overlapping-ddp")
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad = name not in case.frozen
        chunk = torch.nn.ModuleDict({"layer": self.module})
        split_transformer_engine(chunk, split, "v-half")
        self.no_sync = take_gradients(case, chunk)
        self.inputs: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, torch.Tensor] = {}

    def run(self, passes: str) -> Run:
        with self.no_sync():
            for one in passes.split():
                getattr(self, one[:-1])(int(one[-1]))
        return self

    def F(self, microbatch: int) -> None:
        self.inputs[microbatch] = x = microbatch_of(self.case, microbatch)
        more = [SPLITS] if self.case.kind == "GroupedLinear" else []
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
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
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
# TE makes the gradient of fc1's bias in B for its fused gelu, and in W for other activations.
KINDS = ["Linear", "LayerNormLinear", "LayerNormMLP-gelu", "LayerNormMLP-relu", "GroupedLinear"]
TAKES = [
    (False, "autograd"),
    (False, "main_grad"),
    (False, "ddp"),
    (False, "overlapping-ddp"),
    (True, "main_grad"),
    (True, "ddp"),
    (True, "overlapping-ddp"),
]


def compare_everywhere(kind: str) -> list[str]:
    """A module in every type, for every taker of gradients: deferred, whole and mixed passes."""
    found = []
    for dtype, tolerance in TOLERANCE.items():
        expected = gradients_in_torch(Case(kind, dtype), 3)
        for fused, takes in TAKES:
            case = Case(kind, dtype, fused, takes)
            whole = gradients(case, WHOLE)
            problems = unlike(whole, expected, tolerance)
            problems += unlike(gradients(case, MIXED), expected, tolerance)
            problems += unlike(gradients(case, DEFERRED), whole)
            found += [f"{case}: {problem}" for problem in problems]
    return found


@pytest.mark.parametrize("kind", [*KINDS, "TEColumnParallelLinear"])
def test_gradients_equal_torchs(pool: RankPool, kind: str) -> None:
    """And those of deferred W equal those of BW, bit for bit.

    Megatron's layer makes its bias anew after TE has built it, and its data parallelism knows
    nothing of a delay here: the bias's gradient must be there all the same.
    """
    assert pool.run(compare_everywhere, kind=kind) == [[], []]


def compare_options(case: Case) -> list[str]:
    expected = gradients_in_torch(case, 3)
    return unlike(gradients(case, DEFERRED), expected, 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"return_bias": True},
        {"parameters_split": ("a_", "b_")},
    ],
    ids=str,
)
@pytest.mark.parametrize("takes", ["autograd", "main_grad"])
def test_options_of_linear(pool: RankPool, options: dict[str, Any], takes: str) -> None:
    """A weight that is split into parameters would lose its gradient in TE's W: it stays in B."""
    case = Case("Linear", takes=takes, options=tuple(options.items()))
    assert pool.run(compare_options, case=case) == [[], []]


def compare_frozen(case: Case) -> list[str]:
    expected = gradients_in_torch(case, 3)
    run = Run(case).run(DEFERRED)
    found = unlike(run.gradients(), zeroed(expected, case.frozen), 1e-5)
    return found if not run.memory.peak_bytes else [*found, "weight gradients were queued"]


def zeroed(gradients: dict[str, torch.Tensor], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(g) if n in names else g for n, g in gradients.items()}


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("Linear", ("weight", "bias")),
        ("LayerNormMLP-relu", ("fc1_weight", "fc1_bias")),
        ("GroupedLinear", ("weight0", "weight1", "bias0", "bias1")),
    ],
)
def test_frozen_weights_stay_out(pool: RankPool, kind: str, frozen: tuple[str, ...]) -> None:
    """A module of which only a part is frozen does all in B."""
    assert pool.run(compare_frozen, case=Case(kind, frozen=frozen)) == [[], []]


def names_without_gradient(kind: str) -> set[str]:
    run = Run(Case(kind, takes="main_grad")).run(NO_W_YET)
    return {name for name, gradient in run.gradients().items() if not gradient.any()}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("Linear", "weight bias"),
        ("LayerNormLinear", "weight bias"),
        ("LayerNormMLP-gelu", "fc1_weight fc2_weight fc2_bias"),
        ("LayerNormMLP-relu", "fc1_weight fc1_bias fc2_weight fc2_bias"),
        ("GroupedLinear", "weight0 weight1 bias0 bias1"),
    ],
)
def test_b_leaves_weights_and_their_biases_to_w(pool: RankPool, kind: str, names: str) -> None:
    """TE's weight-gradient kernel makes the bias's gradient, too."""
    assert pool.run(names_without_gradient, kind=kind) == [set(names.split())] * 2


def bytes_held(kind: str, passes: str) -> tuple[int, int, int]:
    memory = (run := Run(Case(kind)).run(passes)).memory
    live = memory.live_bytes
    for microbatch in range(len(run.queue)):
        run.W(microbatch)
    return live, memory.live_bytes, memory.peak_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_backward_queues_nothing(pool: RankPool, kind: str) -> None:
    assert pool.run(bytes_held, kind=kind, passes=WHOLE) == [(0, 0, 0)] * 2


@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_what_is_held_until_w_is_counted(pool: RankPool, kind: str) -> None:
    held = 3 * TOKENS * (WIDTH + WIDER) * 4
    assert pool.run(bytes_held, kind=kind, passes=NO_W_YET) == [(held, 0, held)] * 2


def stage_input_is_gone_after_b(kind: str) -> bool:
    run = Run(Case(kind))
    x = microbatch_of(run.case, 0)
    more = [SPLITS] if kind == "GroupedLinear" else []
    y = loss(run.module(x * 2, *more))
    with run.queue.collecting(0):
        y.backward()
    assert x.grad is not None
    seen = weakref.ref(x)
    del x, y
    assert len(run.queue) == 1
    return seen() is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_for_w_does_not_keep_the_input_of_the_stage(pool: RankPool, kind: str) -> None:
    """Its graph leads there: one more message would be held for each W that is left."""
    assert pool.run(stage_input_is_gone_after_b, kind=kind) == [True] * 2


SHARED = {"sequence_parallel": True}
COLUMN, ROW = {"parallel_mode": "column", **SHARED}, {"parallel_mode": "row", **SHARED}
SEQUENCE_PARALLEL = [
    ("Linear", COLUMN),
    ("LayerNormLinear", COLUMN),
    ("Linear", ROW),
    ("LayerNormMLP-relu", {"set_parallel_mode": True, **SHARED}),
]
NAMES_OF_SEQUENCE_PARALLEL = ["column", "column-with-norm", "row", "mlp"]


def compare_with_whole(kind: str, options: dict[str, Any]) -> list[str]:
    found = []
    for dtype in TOLERANCE:
        for fused, takes in TAKES[:2] + TAKES[4:5]:
            case = Case(kind, dtype, fused, takes, tuple(options.items()))
            whole = gradients(case, WHOLE)
            for passes in (DEFERRED, MIXED):
                problems = unlike(gradients(case, passes), whole)
                found += [f"{case} {passes}: {problem}" for problem in problems]
    return found


@pytest.mark.parametrize(("kind", "options"), SEQUENCE_PARALLEL, ids=NAMES_OF_SEQUENCE_PARALLEL)
def test_sequence_parallel_gradients_equal_those_of_a_whole_backward(
    pool: RankPool, kind: str, options: dict[str, Any]
) -> None:
    assert pool.run(compare_with_whole, kind=kind, options=options) == [[], []]


def after_b_of_sequence_parallel(kind: str, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that are held, and how many of the gathered tensors there still are."""
    from transformer_engine.pytorch.module import base, layernorm_linear, layernorm_mlp, linear

    modules: list[Any] = [base, layernorm_linear, layernorm_mlp, linear]
    gather = linear.gather_along_first_dim
    gathered: list[weakref.ref[torch.Tensor]] = []

    def recorded(*args: Any, **more: Any) -> Any:
        result = gather(*args, **more)
        gathered.append(weakref.ref(result[0]))
        return result

    for module in modules:
        module.gather_along_first_dim = recorded
    try:
        run = Run(Case(kind, options=tuple(options.items()))).run("F0 B0")
        assert gathered
        until = time.monotonic() + 5  # gloo's thread lets go of a tensor a moment later
        while any(one() is not None for one in gathered) and time.monotonic() < until:
            time.sleep(0.01)
        return run.memory.live_bytes, sum(one() is not None for one in gathered)
    finally:
        for module in modules:
            module.gather_along_first_dim = gather


@pytest.mark.parametrize(
    ("kind", "options", "numbers"),
    [
        (*case, TOKENS * numbers)
        for case, numbers in zip(
            SEQUENCE_PARALLEL,
            [
                WIDTH + 2 * WIDER // 2,
                WIDTH + 2 * WIDER // 2,
                2 * WIDTH // 2 + WIDER,
                (WIDTH + 2 * WIDER // 2) + (2 * WIDER // 2 + WIDTH),
            ],
            strict=True,
        )
    ],
    ids=NAMES_OF_SEQUENCE_PARALLEL,
)
def test_what_sequence_parallelism_gathers_is_held_as_a_shard(
    pool: RankPool, kind: str, options: dict[str, Any], numbers: int
) -> None:
    """Of each token that a rank has: the input of a column, the output gradient of a row."""
    found = pool.run(after_b_of_sequence_parallel, kind=kind, options=options)
    assert found == [(numbers * 4, 0)] * 2


class UserBuffer:
    """One of TE's communication buffers, shared by all layers of a name; it gathers at once."""

    def __init__(self) -> None:
        self._memory = torch.full((1000,), torch.nan)
        self.uses = 0

    def with_cublasmp(self) -> bool:
        return False

    def is_fp8_ubuf(self) -> bool:
        return False

    def copy_into_buffer(self, local: torch.Tensor, local_chunk: bool) -> None:
        assert local_chunk
        self.uses += 1
        gathered = self._memory[: 2 * local.numel()].view(-1, *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.detach().contiguous())

    def get_buffer(self, shape: list[int]) -> torch.Tensor:
        return self._memory[: torch.Size(shape).numel()].view(shape)


def compare_user_buffers(kind: str, options: dict[str, Any], overlap: str) -> tuple[list[str], int]:
    from transformer_engine.pytorch.module import base

    expected = gradients(Case(kind, options=tuple(options.items())), WHOLE)
    buffer, key = UserBuffer(), ("layer_dgrad", base.UserBufferQuantizationMode.NONE)
    base._ub_initialized, base._ub_communicators = True, {key: buffer}
    try:
        more = {overlap: True, "ub_name": "layer"}
        case = Case(kind, options=tuple({**options, **more}.items()))
        return unlike(gradients(case, DEFERRED), expected), buffer.uses
    finally:
        base._ub_initialized, base._ub_communicators = False, None


@pytest.mark.parametrize(
    ("kind", "options", "overlap"),
    [
        ("Linear", COLUMN, "ub_bulk_dgrad"),
        ("LayerNormLinear", COLUMN, "ub_bulk_dgrad"),
        ("Linear", ROW, "ub_overlap_ag"),
    ],
    ids=["column", "column-with-norm", "row"],
)
def test_w_does_not_read_buffers_that_the_next_b_fills_anew(
    pool: RankPool, kind: str, options: dict[str, Any], overlap: str
) -> None:
    """TE hands W what it has gathered as a view of a buffer that layers share."""
    found = pool.run(compare_user_buffers, kind=kind, options=options, overlap=overlap)
    assert [problems for problems, _ in found] == [[], []]
    assert [uses for _, uses in found] == [3, 3]


def first_microbatch_last() -> list[str]:
    """Megatron tells TE which microbatch is the first; fused, TE lets it overwrite main_grad."""
    case = Case("TEColumnParallelLinear", fused=True, takes="main_grad")
    return unlike(gradients(case, "F0 F1 B0 BW1 W0"), gradients_in_torch(case, 2), 1e-5)


def test_the_first_microbatch_adds_to_main_grad(pool: RankPool) -> None:
    assert pool.run(first_microbatch_last) == [[], []]


def gradients_around_b() -> list[str]:
    run = Run(Case("GroupedLinear")).run("F0 BW0")
    before = {name: g for name, g in run.gradients().items() if name.startswith("weight")}
    return unlike(run.run("F1 B1").gradients(), before)


def test_b_of_experts_leaves_the_gradients_there_are(pool: RankPool) -> None:
    """TE's B returns memory that W is to fill as the gradient; autograd would add it."""
    assert pool.run(gradients_around_b) == [[], []]


def refusal(setting: str) -> str:
    import transformer_engine

    run = Run(Case("Linear"))
    chunk: Any = torch.nn.ModuleDict({"layer": build(run.case)})
    if setting == "bulk":
        chunk["layer"].ub_bulk_wgrad = True
    if setting in ("fp8", "fp4"):
        chunk.config = SimpleNamespace(**{setting: "hybrid"})
    if setting == "fuser":
        chunk.config = SimpleNamespace(use_transformer_engine_op_fuser=True)
    if setting == "operation":
        from transformer_engine.pytorch import ops

        chunk["operation"] = ops.BasicLinear(WIDTH, WIDER, device="cpu", dtype=torch.float32)
    version = transformer_engine.__version__
    if setting == "version":
        transformer_engine.__version__ = "2.2.1"
    try:
        split_transformer_engine(chunk, SplitBackward(WeightGradQueue()), "v-half")
    except UsageError as error:
        return str(error)
    finally:
        transformer_engine.__version__ = version
    return "not refused"


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        (
            "fp8",
            "--fp8-format (fp8) cannot be combined with --pipeline-schedule v-half: weight "
            "gradients that are computed later have not been shown right in fp8",
        ),
        (
            "fp4",
            "--fp4-format (fp4) cannot be combined with --pipeline-schedule v-half: weight "
            "gradients that are computed later have not been shown right in fp4",
        ),
        (
            "bulk",
            "--tp-comm-overlap cannot be combined with --pipeline-schedule v-half while it "
            "overlaps communication of B with the weight gradient: add "
            "--disable-tp-comm-bulk-wgrad",
        ),
        *(
            (
                setting,
                f"{said} cannot be combined with --pipeline-schedule v-half: {WHY_NOT_OPERATIONS}",
            )
            for setting, said in (
                ("fuser", "--use-transformer-engine-op-fuser"),
                ("operation", "a BasicLinear"),
            )
        ),
        (
            "version",
            "--pipeline-schedule v-half needs Transformer-Engine 2.3 or newer, which can defer "
            "weight gradients, but 2.2.1 is installed",
        ),
    ],
)
def test_refused(pool: RankPool, setting: str, text: str) -> None:
    assert pool.run(refusal, setting=setting) == [text] * 2


def test_versions() -> None:
    served = {"2.3.0": True, "2.20.2": True, "2.9.0+70f5366": True, "2.2.1": False, "1.13": False}
    assert {v: transformer_engine_is_supported(v) for v in served} == served


def specification(config: Any, vp_stage: int | None) -> Any:
    """Megatron's layer of TE modules; attention itself has no weights, and TE's needs a GPU."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        multi_latent_attention=config.multi_latent_attention,
    )
    latent = config.multi_latent_attention
    core = gpt_cases.LatentAttention if latent else DotProductAttention
    layer.submodules.self_attention.submodules.core_attention = core
    return layer


def differences(case: GPTCase, schedule: str, microbatches: list[int]) -> list[str]:
    """From Megatron's own schedule over the same modules, which then know nothing of a split."""
    gpt_cases._specification = specification
    return gpt_cases.differences(case, schedule, microbatches, iterations=2)


EXPERTS = GPTCase(
    options=(("num_moe_experts", 2), ("moe_grouped_gemm", True), ("add_bias_linear", False))
)


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize(
    "case",
    [
        GPTCase(),
        GPTCase(dtype="bfloat16", fused_accumulation=True, tied=True),
        GPTCase(wrapped=False),
        GPTCase(overlap_grad_reduce=True),
        GPTCase(overlap_grad_reduce=True, fused_accumulation=True),
        EXPERTS,
        replace(EXPERTS, fused_accumulation=True, overlap_grad_reduce=True),
    ],
    ids=[
        "plain",
        "bf16-fused-tied",
        "no-ddp",
        "overlap",
        "overlap-fused",
        "experts",
        "experts-overlap-fused",
    ],
)
def test_models_equal_megatrons(pool: RankPool, case: GPTCase, schedule: str) -> None:
    found = pool.run(differences, case=case, schedule=schedule, microbatches=[5])
    assert found == [[], []]


LATENT = GPTCase(
    rotary=True,
    options=(
        ("multi_latent_attention", True),
        ("q_lora_rank", 16),
        ("kv_lora_rank", 16),
        ("qk_head_dim", 8),
        ("qk_pos_emb_head_dim", 8),
        ("v_head_dim", 16),
        ("kv_channels", 16),
        ("rope_type", "rope"),
        ("add_bias_linear", False),
    ),
)


@pytest.mark.parametrize("schedule", ["v-half", "zb-h1"])
@pytest.mark.parametrize(
    "case",
    [
        replace(LATENT, fused_accumulation=True),
        replace(EXPERTS, overlap_grad_reduce=True),
        GPTCase(data_parallel=2, overlap_grad_reduce=True, bucket_size=5000),
        GPTCase(tensor_parallel=2, fused_accumulation=True),
        GPTCase(tensor_parallel=2, sequence_parallel=True),
    ],
    ids=["latent-attention", "experts", "small-buckets", "tp2", "sequence-parallel"],
)
def test_models_on_four_ranks_equal_megatrons(
    ranks: RankPools, pool: RankPool, case: GPTCase, schedule: str
) -> None:
    four = ranks(4, Kind.TRANSFORMER_ENGINE)
    assert four.run(differences, case=case, schedule=schedule, microbatches=[5]) == [[]] * 4
