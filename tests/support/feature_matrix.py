"""What has been tried together with a pipeline schedule, and what became of it.

The one source of the table in docs/support.md and of the cases in test_feature_matrix.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from gpt_cases import FIRST_WITH_HYBRIDS, GPTCase
from model_options import EXPERTS, GATED_DELTA, LATENT, MAMBA, RECOMPUTED, ROUTED, options

REPRESENTATIVE = ("v-half", "zb-h1", "interleaved")
EVERY = "every schedule"


class Verdict(Enum):
    """What became of it; ``differences`` shows the first two."""

    PARITY = "losses and gradients equal"
    STEPS = "losses and weights equal after 3 optimizer steps"
    ROUNDED = "equal up to the order of sums"
    LOSSES = "losses equal"
    DATA = "data equal"
    AGAIN = "equal again, nothing left over"
    NOT_ON_CPU = "not runnable on a CPU"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    ``settings`` are what a Megatron engineer looks for; ``test`` names the test that shows it where
    it is not the one that runs ``case`` under ``schedules`` on so many ``ranks``.
    """

    feature: str
    settings: str
    case: GPTCase | None
    verdict: Verdict = Verdict.PARITY
    schedules: tuple[str, ...] = REPRESENTATIVE
    ranks: int = 2
    test: str | None = None
    every_schedule: bool = False
    reason: str = ""
    since: tuple[int, int] = (0, 16)
    """The first series of Megatron that has it."""
    until: tuple[int, int] = (99, 0)
    """The first series of Megatron for which there is no test of it."""
    pattern_test: str | None = None
    """The test of a HybridModel with the same layers, if it is not that of :data:`ON_PATTERNS`."""
    pattern_refused: str = ""
    """Why it is refused for a HybridModel."""

    @property
    def has_pattern(self) -> bool:
        """Whether a HybridModel may have the same layers."""
        is_gpt = self.case is not None and self.case.hybrid is None
        return is_gpt and self.until > FIRST_WITH_HYBRIDS

    @property
    def parallel(self) -> str:
        """The parallel sizes, such as PP=2 DP=2."""
        case = self.case or GPTCase()
        others = case.tensor_parallel * case.context_parallel * case.data_parallel
        pipeline = self.ranks // others
        sizes = {
            "PP": pipeline,
            "TP": case.tensor_parallel,
            "CP": case.context_parallel,
            "DP": case.data_parallel,
            "EP": case.expert_parallel,
        }
        return " ".join(f"{name}={n}" for name, n in sizes.items() if n > 1)


_PLANS = "only GPTModel has Megatron's plans of a layer"


def _shown(feature: str, settings: str, test: str, case: GPTCase, ranks: int = 2) -> Row:
    """A row that another test shows, with every schedule."""
    return Row(feature, settings, case, ranks=ranks, test=test, every_schedule=True)


_GRADIENTS = "test_gradients_equal_megatrons"
_VARIANTS = "test_variants_equal_megatrons"
_WITH_TE = ("v-half", "zb-h1", "v-zb", "interleaved")
_PARALLEL = "test_tensor_and_data_parallel_equal_megatrons"

_IMAGES = (1, 2, 0, 0, 2, 1)  # the second of three microbatches has none
_AFTER_RELEASES = (0, 20)
"""The series of Megatron's main branch after 0.19."""
_OVERLAPS = GPTCase(
    data_parallel=2,
    distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    optimizer_steps=3,
)

ROWS = (
    Row(
        "vocabulary parallel",
        "`--pipeline-vocabulary on`",
        GPTCase(),
        Verdict.ROUNDED,
        schedules=("v-half", "zb-h1", "1f1b", "v-zb"),
        test="test_a_sharded_output_layer_trains_as_megatrons",
        pattern_test="test_a_sharded_output_layer_trains_as_megatrons",
    ),
    Row(
        "the same, multi-token prediction",
        "`--mtp-num-layers 2`",
        GPTCase(multi_token=2, rotary=True),
        Verdict.ROUNDED,
        schedules=("v-half", "zb-h1", "1f1b", "v-zb", "interleaved"),
        test="test_prediction_trains_as_megatrons",
        pattern_test="test_prediction_trains_as_megatrons",
    ),
    Row(
        "the same, overlapped forward-backward",
        "`--overlap-moe-expert-parallel-comm`",
        GPTCase(dtype="bfloat16", data_parallel=2, expert_parallel=2),
        Verdict.ROUNDED,
        ranks=4,
        schedules=("v-half", "v-zb", "interleaved"),
        test="test_so_are_they_where_a_forward_and_a_backward_run_in_one_pass",
        pattern_refused=_PLANS,
    ),
    Row(
        "token slices",
        "`--pipeline-slices 4`",
        GPTCase(),
        Verdict.ROUNDED,
        schedules=("1f1b", "interleaved", "zb-h1", "v-half", "v-min", "v-zb", "auto"),
        test="test_a_sliced_step_is_megatrons_up_to_rounding",
        pattern_test="test_a_hybrid_model_is_cut_as_a_gpt",
    ),
    Row(
        "recomputation and offload by the schedule",
        "`--pipeline-recompute auto`, `--pipeline-offload auto`",
        GPTCase(),
        Verdict.LOSSES,
        schedules=("v-half", "auto"),
        test="test_what_is_recomputed_or_offloaded_logs_what_upstream_logs",
        pattern_test="test_a_gpt_as_a_pattern_logs_what_upstream_logs",
    ),
    # precision
    _shown("float32", "no `--bf16`", _GRADIENTS, GPTCase()),
    _shown("bfloat16", "`--bf16`", _GRADIENTS, GPTCase(dtype="bfloat16")),
    Row(
        "float16, loss scale",
        "`--fp16`, `grad_scale_func`",
        GPTCase(dtype="float16", grad_scale=1024.0),
    ),
    Row(
        "parameters kept in 32 bits, experts, distributed optimizer",
        "`--bf16`, `mark_keep_in_fp32`",
        GPTCase(
            data_parallel=2,
            dtype="bfloat16",
            changes=("in 32 bits",),
            distributed_optimizer=True,
            overlap_grad_reduce=True,
            optimizer_steps=3,
            options=options(**EXPERTS),
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "zb-h1"),
        since=_AFTER_RELEASES,
    ),
    Row(
        "fp8 (current scaling) and nvfp4, Transformer Engine's Python recipes",
        "`--fp8-format`, `--fp4-format`",
        GPTCase(dtype="bfloat16", optimizer_steps=3),
        Verdict.STEPS,
        schedules=_WITH_TE,
        test="test_quantized_models_equal_megatrons",
        pattern_test="test_quantized_models_equal_megatrons",
    ),
    Row(
        "fp8 and fp4 kernels",
        "`--fp8-format`, `--fp4-format`, `--fp8-param-gather`, `--moe-grouped-gemm`",
        None,
        Verdict.NOT_ON_CPU,
        reason="on a GPU, losses and weights of delayed, current and blockwise scaling are equal, "
        "also with experts. mxfp8 has run with stand-ins, nvfp4 has none. Until W, a rank holds "
        "gathered inputs of sequence parallelism in fp8 or fp4 unsharded",
    ),
    Row(
        "Transformer Engine kernels",
        "`--transformer-impl transformer_engine`",
        None,
        Verdict.NOT_ON_CPU,
        reason="on a GPU, losses and weights are equal, also with offload and recomputation",
    ),
    Row(
        "CUDA graphs per layer",
        "`--cuda-graph-impl transformer_engine`",
        None,
        Verdict.NOT_ON_CPU,
        reason="on a GPU, replayed steps give the gradients of steps without graphs, in bf16 and "
        "fp8; fp4 has no stand-in. In pairs: stand-ins. Graphs compute weight gradients in B",
    ),
    Row(
        "CUDA graphs per iteration",
        "`--cuda-graph-impl local --cuda-graph-scope full_iteration`; 0.19: "
        "`--cuda-graph-impl full_iteration`",
        None,
        Verdict.NOT_ON_CPU,
        reason="in tests, gradients are equal and nothing waits for the device",
    ),
    # model
    _shown("untied embeddings", "`--untie-embeddings-and-output-weights`", _GRADIENTS, GPTCase()),
    _shown("tied embeddings", "the default", _GRADIENTS, GPTCase(tied=True), ranks=4),
    Row(
        "Llama-style layers",
        "`--group-query-attention`, `--position-embedding-type rope`, `--swiglu`, "
        "`--normalization RMSNorm`, `--disable-bias-linear`",
        GPTCase(
            rotary=True,
            options=options(
                num_query_groups=2,
                normalization="RMSNorm",
                gated_linear_unit=True,
                add_bias_linear=False,
            ),
        ),
        schedules=(*REPRESENTATIVE, "wave"),
    ),
    Row(
        "multi-latent attention",
        "`--multi-latent-attention`, equal key and value sizes",
        GPTCase(rotary=True, options=LATENT),
    ),
    Row(
        "multi-token prediction",
        "`--mtp-num-layers 1`",
        GPTCase(multi_token=1, rotary=True),
        schedules=(*REPRESENTATIVE, "v-zb"),
    ),
    Row(
        "the same, tied",
        "`--mtp-num-layers 1`",
        GPTCase(multi_token=1, rotary=True, tied=True),
        schedules=(*REPRESENTATIVE, "v-zb"),
    ),
    Row(
        "the same, tied, overlapped gradient reduction",
        "`--mtp-num-layers 1`, `--overlap-grad-reduce`",
        GPTCase(multi_token=1, rotary=True, tied=True, data_parallel=2, overlap_grad_reduce=True),
        ranks=4,
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "mixed hidden states of multi-token prediction",
        "`--mtp-num-layers 2`, `--mtp-hsm`",
        GPTCase(multi_token=2, rotary=True, options=options(mtp_hsm=True)),
        schedules=("1f1b", "v-half", "zb-h1"),
        test="test_mixed_hidden_states_are_drawn_the_same",
        pattern_test="test_mixed_hidden_states_are_drawn_the_same",
        since=_AFTER_RELEASES,
    ),
    Row("frozen weights", "`requires_grad = False`", GPTCase(frozen="linear_fc1.weight")),
    Row(
        "hybrid models (attention, MLP, experts)",
        "`pretrain_hybrid.py`, `--hybrid-layer-pattern *-*E*E*-`",
        GPTCase(hybrid="*-*E*E*-", layers=8, options=options(**ROUTED)),
        schedules=(*REPRESENTATIVE, "v-zb"),
        since=FIRST_WITH_HYBRIDS,
    ),
    Row(
        "hybrid, tied, multi-token prediction",
        "`--hybrid-layer-pattern *-*-*-*-/*-`",
        GPTCase(hybrid="*-*-*-*-", layers=8, multi_token=1, rotary=True, tied=True),
        schedules=_WITH_TE,
        since=FIRST_WITH_HYBRIDS,
    ),
    Row(
        "Mamba layers (scan in torch)",
        "`--hybrid-layer-pattern M*M-M-MM`",
        GPTCase(hybrid="M*M-M-MM", layers=8, options=MAMBA),
        schedules=_WITH_TE,
        since=FIRST_WITH_HYBRIDS,
    ),
    Row(
        "gated delta layers (deterministic, in torch)",
        "`--hybrid-layer-pattern G*G-G-GG`",
        GPTCase(hybrid="G*G-G-GG", layers=8, options=GATED_DELTA),
        schedules=_WITH_TE,
        since=FIRST_WITH_HYBRIDS,
    ),
    Row(
        "Mamba and gated delta kernels",
        "`pretrain_mamba.py`, `pretrain_hybrid.py`",
        None,
        Verdict.NOT_ON_CPU,
        reason="stand-ins are above. Only linear layers are split. Before 0.17, "
        "`pretrain_mamba.py` runs only schedules with one chunk per rank",
    ),
    Row(
        "BERT",
        "`pretrain_bert.py`, schedules with one chunk per rank",
        None,
        Verdict.NOT_ON_CPU,
        reason="its script needs Transformer Engine",
    ),
    Row(
        "images, encoder on the first stage",
        "`LLaVAModel`, built with `vp_stage`; some microbatches without images",
        GPTCase(images=_IMAGES, tied=True, rotary=True, dtype="bfloat16"),
        ranks=4,
        schedules=(*REPRESENTATIVE, "v-zb"),
    ),
    Row(
        "images, fewer layers beside the encoder",
        "`--pipeline-model-parallel-layout`",
        GPTCase(images=_IMAGES, layers=6, layout="E|tt|tt|ttL"),
        schedules=("v-half", "interleaved"),
    ),
    Row(
        "images, frozen encoder",
        "`--freeze-ViT`",
        GPTCase(images=_IMAGES, frozen="vision_model"),
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "images, frozen language model",
        "`--freeze-LM`",
        GPTCase(images=_IMAGES, frozen="language_model"),
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "images, overlapped gradient reduction",
        "`--overlap-grad-reduce`",
        GPTCase(images=_IMAGES, data_parallel=2, overlap_grad_reduce=True),
        ranks=4,
        schedules=("v-half", "zb-h1"),
    ),
    # mixture of experts
    Row(
        "expert parallelism",
        "`--expert-model-parallel-size 2`, `--moe-router-load-balancing-type aux_loss`, "
        "`--moe-shared-expert-intermediate-size`, `--moe-token-dispatcher-type alltoall`",
        GPTCase(
            layers=8,
            data_parallel=2,
            expert_parallel=2,
            options=options(**EXPERTS, moe_shared_expert_intermediate_size=32),
        ),
        ranks=4,
        schedules=(*REPRESENTATIVE, "wave"),
    ),
    Row(
        "overlapped forward-backward; also with one multi-token prediction layer, dense first "
        "layers, distributed optimizer, recomputation by the schedule",
        "`--overlap-moe-expert-parallel-comm`",
        GPTCase(layers=8, dtype="bfloat16", data_parallel=2, expert_parallel=2),
        ranks=4,
        schedules=("v-half", "v-zb", "dualpipe-v", "interleaved"),
        test="test_pairs_compute_what_megatron_computes",
        pattern_refused=_PLANS,
    ),
    Row(
        "overlap of the expert all-to-all",
        "`--overlap-moe-expert-parallel-comm`",
        None,
        Verdict.NOT_ON_CPU,
        reason="tests see the pairing of passes. Streams and the order within a pair are "
        "Megatron's",
    ),
    Row(
        "shared expert overlap (without its stream)",
        "`--moe-shared-expert-overlap`",
        GPTCase(
            layers=4,
            data_parallel=2,
            expert_parallel=2,
            options=options(
                **EXPERTS,
                moe_shared_expert_intermediate_size=32,
                moe_shared_expert_overlap=True,
            ),
        ),
        ranks=4,
        schedules=_WITH_TE,
    ),
    Row(
        "fused experts and paged stash (Transformer Engine stand-ins)",
        "`--use-transformer-engine-op-fuser`, `--moe-paged-stash`",
        GPTCase(),
        schedules=_WITH_TE,
        test="test_a_stash_follows_the_order_of_a_schedule",
        pattern_test="test_a_stash_follows_the_order_of_a_schedule",
        since=(0, 18),
    ),
    Row(
        "expert parallelism, all-gather",
        "`--expert-model-parallel-size 2`, `--moe-token-dispatcher-type allgather`",
        GPTCase(
            data_parallel=2,
            expert_parallel=2,
            options=options(**ROUTED, moe_token_dispatcher_type="allgather"),
        ),
        ranks=4,
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "expert bias",
        "`--moe-router-enable-expert-bias`, `--moe-router-score-function sigmoid`",
        GPTCase(
            data_parallel=2,
            optimizer_steps=3,
            options=options(
                **{**EXPERTS, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
                moe_router_score_function="sigmoid",
                moe_router_enable_expert_bias=True,
                moe_router_bias_update_rate=0.1,
            ),
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "experts without tokens",
        "32 experts, 64 choices",
        GPTCase(
            layers=4,
            options=options(**{**EXPERTS, "num_moe_experts": 32}),
        ),
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "dense first layers",
        "`--moe-layer-freq [0,0,1,1]`",
        GPTCase(
            layers=4,
            options=options(**EXPERTS, moe_layer_freq=(0, 0, 1, 1)),
        ),
    ),
    Row(
        "frozen experts",
        "`requires_grad = False`",
        GPTCase(
            layers=4,
            frozen="local_experts.1",
            options=options(**EXPERTS),
        ),
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "grouped GEMM kernels",
        "`--moe-grouped-gemm`",
        None,
        Verdict.NOT_ON_CPU,
        reason="on a GPU, losses and weights are equal, in bf16 and fp8",
    ),
    Row(
        "DeepEP dispatcher",
        "`--moe-token-dispatcher-type flex`",
        None,
        Verdict.NOT_ON_CPU,
        reason="needs CUDA kernels",
    ),
    # parallel sizes
    _shown("tensor parallelism", "TP=2", _PARALLEL, GPTCase(tensor_parallel=2), 4),
    _shown(
        "sequence parallelism",
        "`--sequence-parallel`",
        _PARALLEL,
        GPTCase(tensor_parallel=2, sequence_parallel=True),
        4,
    ),
    _shown("data parallelism", "DP=2", _PARALLEL, GPTCase(data_parallel=2, tied=True), 4),
    Row(
        "context parallelism (Transformer Engine stand-ins)",
        "`--context-parallel-size 2`, `--cp-comm-type all_gather` and `a2a`",
        GPTCase(context_parallel=2, dtype="bfloat16"),
        ranks=4,
        schedules=_WITH_TE,
        test="test_context_parallel_models_equal_megatrons",
        pattern_test="test_context_parallel_models_equal_megatrons",
    ),
    Row(
        "ring context parallelism",
        "`--cp-comm-type p2p`, the default",
        None,
        Verdict.NOT_ON_CPU,
        reason="on a GPU, losses are equal",
    ),
    # gradients and optimizer
    _shown(
        "overlapped gradient reduction",
        "`--overlap-grad-reduce`",
        _PARALLEL,
        GPTCase(data_parallel=2, overlap_grad_reduce=True),
        4,
    ),
    _shown(
        "fused gradient accumulation",
        "`gradient_accumulation_fusion`, in torch",
        _VARIANTS,
        GPTCase(fused_accumulation=True, dtype="bfloat16"),
    ),
    _shown(
        "loss per token",
        "`--calculate-per-token-loss`",
        _VARIANTS,
        GPTCase(tied=True, per_token_loss=True),
    ),
    _shown("no data-parallel wrapper", "plain chunks", _VARIANTS, GPTCase(wrapped=False)),
    Row(
        "Adam, tied",
        "the default",
        GPTCase(data_parallel=2, tied=True, optimizer_steps=3),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half",),
    ),
    Row(
        "Muon, tied (in torch)",
        "`--optimizer muon` (0.16, 0.17)",
        GPTCase(data_parallel=2, tied=True, optimizer_steps=3, optimizer="muon"),
        Verdict.STEPS,
        ranks=4,
        schedules=_WITH_TE,
        until=(0, 18),
    ),
    Row(
        "Muon, tensor-parallel",
        "`--optimizer muon` (0.16, 0.17), `--muon-tp-mode duplicated`",
        GPTCase(tensor_parallel=2, optimizer_steps=3, optimizer="muon"),
        Verdict.STEPS,
        ranks=4,
        schedules=_WITH_TE,
        until=(0, 18),
    ),
    Row(
        "Muon, layer-wise",
        "`--optimizer dist_muon` (0.16, 0.17), `--overlap-grad-reduce`, `--bf16`",
        GPTCase(
            data_parallel=2,
            dtype="bfloat16",
            overlap_grad_reduce=True,
            optimizer_steps=3,
            optimizer="layer-wise muon",
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=_WITH_TE,
        until=(0, 18),
    ),
    Row(
        "distributed optimizer",
        "`--use-distributed-optimizer`",
        GPTCase(data_parallel=2, distributed_optimizer=True, optimizer_steps=3),
        Verdict.STEPS,
        ranks=4,
    ),
    Row(
        "distributed optimizer, tied, bfloat16",
        "`--use-distributed-optimizer`, `--bf16`",
        GPTCase(
            data_parallel=2,
            tied=True,
            dtype="bfloat16",
            distributed_optimizer=True,
            optimizer_steps=3,
        ),
        Verdict.STEPS,
        ranks=4,
    ),
    Row(
        "distributed optimizer, overlapped gradient reduction",
        "`--use-distributed-optimizer`, `--overlap-grad-reduce`",
        GPTCase(
            data_parallel=2,
            distributed_optimizer=True,
            overlap_grad_reduce=True,
            optimizer_steps=3,
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "interleaved"),
    ),
    Row(
        "overlapped gather, aligned, tied",
        "`--use-distributed-optimizer`, `--overlap-grad-reduce`, `--overlap-param-gather`",
        replace(_OVERLAPS, align_param_gather=True, tied=True),
        Verdict.STEPS,
        ranks=4,
        schedules=(*REPRESENTATIVE, "v-zb"),
    ),
    Row(
        "overlapped gather, not aligned",
        "`--use-distributed-optimizer`, `--overlap-grad-reduce`, `--overlap-param-gather`, "
        "`--no-align-param-gather`",
        _OVERLAPS,
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "zb-h1"),
    ),
    Row(
        "overlapped gather, aligned, weights read ahead",
        "`--overlap-grad-reduce`, `--overlap-param-gather`, `ensure_params_ready`",
        replace(_OVERLAPS, align_param_gather=True, late_changes=("read ahead",)),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "zb-h1"),
        since=_AFTER_RELEASES,
    ),
    Row(
        "gather overlapped with the optimizer step",
        "`--overlap-param-gather-with-optimizer-step`",
        replace(_OVERLAPS, gather_in_optimizer=True),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "v-zb", "interleaved", "wave"),
    ),
    Row(
        "the same, tied, bfloat16, aligned",
        "`--overlap-param-gather-with-optimizer-step`, `--bf16`",
        replace(
            _OVERLAPS,
            gather_in_optimizer=True,
            align_param_gather=True,
            tied=True,
            dtype="bfloat16",
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half", "v-zb", "interleaved"),
    ),
    Row(
        "the same, expert parallelism",
        "`--overlap-param-gather-with-optimizer-step`, `--expert-model-parallel-size 2`",
        replace(
            _OVERLAPS,
            gather_in_optimizer=True,
            expert_parallel=2,
            options=options(**EXPERTS),
        ),
        Verdict.STEPS,
        ranks=4,
        schedules=("v-half",),
    ),
    Row(
        "the same, replicated expert parallelism",
        "`--overlap-param-gather-with-optimizer-step`, `--expert-model-parallel-size 2`",
        replace(
            _OVERLAPS,
            data_parallel=4,
            gather_in_optimizer=True,
            expert_parallel=2,
            options=options(**EXPERTS),
        ),
        Verdict.STEPS,
        ranks=8,
        schedules=("v-half", "interleaved"),
        test="test_replicas_of_experts_are_gathered_after_they_are_stepped",
        pattern_test="test_replicas_of_experts_are_gathered_after_they_are_stepped",
    ),
    # activations
    _shown(
        "full recomputation",
        "`--recompute-granularity full`",
        _VARIANTS,
        GPTCase(options=RECOMPUTED),
    ),
    Row(
        "selective recomputation of attention",
        "`--recompute-granularity selective`",
        GPTCase(options=options(recompute_granularity="selective")),
    ),
    Row(
        "selective recomputation, every module (Transformer Engine stand-ins)",
        "`--recompute-modules core_attn layernorm mla_up_proj moe moe_act shared_experts`; `mlp` "
        "needs `--disable-bias-linear`, as in Megatron",
        GPTCase(),
        schedules=_WITH_TE,
        test="test_recomputed_models_equal_megatrons",
        pattern_test="test_recomputed_models_equal_megatrons",
    ),
    Row(
        "fp8 with selective or full recomputation",
        "`--fp8-format`, delayed, current and mxfp8 scaling",
        GPTCase(dtype="bfloat16", optimizer_steps=3),
        Verdict.STEPS,
        schedules=_WITH_TE,
        test="test_recomputed_models_equal_megatrons",
        pattern_test="test_recomputed_models_equal_megatrons",
    ),
    # layers and shapes
    Row(
        "layers not divisible by stages",
        "`--num-layers 7`",
        GPTCase(layers=7),
        schedules=(*REPRESENTATIVE, "wave"),
    ),
    Row(
        "layout with an empty stage",
        "`--pipeline-model-parallel-layout Ettt||t|ttL`",
        GPTCase(layers=6, layout="Ettt||t|ttL"),
        schedules=("v-half", "v-zb", "interleaved"),
    ),
    Row(
        "layout with separate embedding and loss",
        "`--pipeline-model-parallel-layout E|tttt|tt|L`",
        GPTCase(layers=6, tied=True, layout="E|tttt|tt|L"),
        schedules=("v-half", "interleaved"),
    ),
    Row(
        "variable sequence lengths",
        "`variable_seq_lengths`",
        GPTCase(lengths=(16, 5, 9), options=options(moe_token_dispatcher_type="alltoall")),
        schedules=(*REPRESENTATIVE, "v-zb", "wave"),
    ),
    # calls
    Row(
        "evaluation",
        "`forward_only`",
        GPTCase(tied=True),
        Verdict.LOSSES,
        ranks=4,
        test="test_evaluation_equals_megatrons",
        every_schedule=True,
    ),
    Row(
        "non-loss data",
        "`collect_non_loss_data`",
        GPTCase(),
        Verdict.DATA,
        test="test_an_evaluation_collects_other_data",
        pattern_test="test_an_evaluation_collects_other_data",
    ),
    Row(
        "rerun of a step",
        "`--rerun-mode`",
        GPTCase(tied=True),
        Verdict.AGAIN,
        schedules=(*REPRESENTATIVE, "v-zb"),
        test="test_a_step_can_be_run_again",
        pattern_test="test_a_step_can_be_run_again",
    ),
)

TRIED_HERE = [
    (row, schedule)
    for row in ROWS
    if row.case is not None and row.test is None
    for schedule in row.schedules
]
_BY_DIFFERENCES = (None, _GRADIENTS, _VARIANTS, _PARALLEL, "test_evaluation_equals_megatrons")
ON_PATTERNS = [
    (row, schedule)
    for row in ROWS
    if row.has_pattern and row.test in _BY_DIFFERENCES
    for schedule in row.schedules
]
"""Rows that are tried with the same layers as a HybridModel."""
IN_EVERY_RUN = {
    (row.feature, row.schedules[(number + step) % len(row.schedules)])
    for number, row in enumerate(ROWS)
    for step in range(2)
}
"""Two of the schedules of each row, other ones for its neighbours; --full tries all."""
