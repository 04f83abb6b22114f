"""Runs that show that arguments are harmless: each argument with a value that is not its default.

A trial logs what Megatron-LM's own schedule logs with the same flags, from the same checkpoint.
Flags that a version of Megatron-LM does not have are left out there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_zb.megatron_lm.argument_table import Argument, arguments


@dataclass(frozen=True)
class Trial:
    """Flags to try, and the flags that they need.

    Attributes:
        beside: flags without which those that are tried say nothing.
        without: flags of the usual run that are left out.
        own_start: whether the model or its optimizer is another one, with a checkpoint of its own.
        prepared: what takes the place of the flags that are tried in the run that saves that.
        texts: whether the run reads texts, not the numbers that Megatron-LM makes up.
        keeps_vocabulary: whether no schedule shards the vocabulary: that sums logits up in another
            order, which the steps of 16 bits show in more digits than are compared.
    """

    tried: str
    beside: str = ""
    without: str = ""
    own_start: bool = False
    texts: bool = False
    prepared: str = ""
    keeps_vocabulary: bool = False

    def words(self, version: str) -> list[str]:
        """The flags that are tried, those alone that the version has, with their values."""
        known = {flag for a in arguments() if version in a.versions for flag in a.flags}
        return [word for group in _groups(self.tried) if group[0] in known for word in group]

    def names(self, version: str) -> set[str]:
        """The arguments that are tried."""
        words = self.words(version)
        return {a.name for a in _of(version) if any(flag in words for flag in a.flags)}


def _of(version: str) -> Iterator[Argument]:
    return (a for a in arguments() if version in a.versions)


def _groups(text: str) -> list[list[str]]:
    """Flags, each with its values."""
    groups: list[list[str]] = []
    for word in text.split():
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def without(words: list[str], flags: str) -> list[str]:
    """A command line without some flags and their values."""
    left_out = flags.split()
    return [w for group in _groups(" ".join(words)) if group[0] not in left_out for w in group]


_ROPE = "--position-embedding-type rope"
_EXPERTS = f"--num-experts 4 --moe-router-topk 2 {_ROPE} --disable-bias-linear"
_LATENT = (
    f"--multi-latent-attention {_ROPE} --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24 "
    "--kv-channels 24 --normalization RMSNorm --spec latent_layers layer"
)
_SAVE = "--save {folder} --save-interval 2"
_SAMPLES = "--train-iters --lr-decay-iters"
_GELU = "--swiglu"

_LOGS = (
    Trial("--log-params-norm --log-throughput --log-num-zeros-in-grad --log-memory-interval 1"),
    Trial("--log-progress", _SAVE),
    Trial("--timing-log-level 2 --timing-log-option all --no-barrier-with-level-1-timing"),
    Trial(
        "--tensorboard-dir {folder} --tensorboard-log-interval 2 --tensorboard-queue-size 10 "
        "--log-timers-to-tensorboard --no-log-loss-scale-to-tensorboard "
        "--log-validation-ppl-to-tensorboard --log-memory-to-tensorboard "
        "--log-world-size-to-tensorboard",
        "--eval-interval 2",
    ),
    Trial("--log-device-memory-used --logging-level 20 --nvtx-ranges"),
    Trial(
        "--profile --profile-step-start 2 --profile-step-end 4 --use-pytorch-profiler "
        "--profile-ranks 0 1 --record-shapes --pytorch-profiler-collect-shapes "
        "--pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra",
        "--tensorboard-dir {folder}",
    ),
    Trial("--profile --profile-step-start 2 --profile-step-end 4 --profile-ranks 0 1"),
    Trial("--record-memory-history --memory-snapshot-path {folder}/snapshot.pickle"),
    Trial("--no-one-logger --app-tag-run-name a --app-tag-run-version 1.0.0"),
    Trial("--one-logger-project p --one-logger-run-name r --one-logger-async", "--no-one-logger"),
    Trial(
        "--log-straggler --straggler-ctrlr-port 61234 --straggler-minmax-count 2 "
        "--disable-straggler-on-startup"
    ),
    Trial("--moe-per-layer-logging", _EXPERTS, own_start=True),
    Trial(
        "--dump-param-to-param-group-map {folder}/groups.json",
        "--use-distributed-optimizer",
        own_start=True,
    ),
    Trial(
        "--flight-recorder-dump-path {folder} --flight-recorder-trace-buffer-size 100 "
        "--no-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace "
        "--no-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec"
    ),
    Trial(
        "--moe-routing-trace-path {folder} --moe-routing-trace-max-training-iters 2 "
        "--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
        "--moe-routing-trace-dump-weights",
        _EXPERTS,
        own_start=True,
    ),
    Trial("--save-activations-interval 2 --save-params-interval 2", _SAVE),
    Trial("--save-tokens-per-expert-interval 2", f"{_EXPERTS} {_SAVE}", own_start=True),
)

_TEXTS = "--mock-data --split"
_DATA = (
    Trial("--data-path {texts}_a", "--split 60,20,20", _TEXTS, texts=True),
    Trial(
        "--train-data-path {texts}_a --valid-data-path {texts}_b --test-data-path {texts}_c",
        without=_TEXTS,
        texts=True,
    ),
    Trial("--data-args-path {texts}_arguments", "--split 60,20,20", _TEXTS, texts=True),
    Trial("--per-split-data-args-path {texts}_splits.json", without=_TEXTS, texts=True),
    Trial(
        "--per-dataset-sequences-path {texts}_sequences.json --dataloader-fast-cache-load "
        "--dataloader-defer-npy-index-mmap --data-cache-path {texts}_cache",
        "--train-data-path 0.5 {texts}_a 0.5 {texts}_b --valid-data-path {texts}_b "
        "--test-data-path {texts}_b",
        _TEXTS,
        own_start=True,
        texts=True,
        prepared="--data-cache-path {texts}_cache",
    ),
    Trial(
        "--no-mmap-bin-files --num-dataset-builder-threads 2 --mid-level-dataset-surplus 0.1",
        "--split 60,20,20 --data-path 0.5 {texts}_a 0.5 {texts}_b",
        _TEXTS,
        texts=True,
    ),
    Trial("--dataloader-type cyclic", "--split 60,20,20 --data-path {texts}_a", _TEXTS, texts=True),
    Trial("--encoder-seq-length 32", without="--seq-length"),
    Trial("--decoder-seq-length 32 --sample-rate 0.5 --mask-prob 0.2 --short-seq-prob 0.2"),
    Trial("--num-workers 0", without="--num-workers"),
    Trial("--reset-attention-mask"),
    Trial("--reset-position-ids --eod-mask-loss"),
    Trial("--reset-attention-mask --reset-position-ids --eod-mask-loss", _ROPE, own_start=True),
    Trial("--no-create-attention-mask-in-dataloader"),
    Trial("--allow-ambiguous-pad-tokens"),
    Trial("--phase-transition-iterations 4", "--train-samples 56", _SAMPLES, own_start=True),
    Trial("--padded-vocab-size 256", own_start=True),
    Trial("--make-vocab-size-divisible-by 64 --vocab-extra-ids 3", own_start=True),
    Trial("--no-pad-vocab-size", own_start=True),
    Trial("--null-tokenizer-eod-id 5 --null-tokenizer-pad-id 6"),
    Trial("--legacy-tokenizer", "--tokenizer-type NullTokenizer"),
    Trial("--trust-remote-code --tokenizer-hf-no-use-fast --tiktoken-num-special-tokens 9"),
    Trial("--tokenizer-hf-no-include-special-tokens --tokenizer-sentencepiece-legacy"),
    Trial("--chat-template x --sft-tokenizer-prompt-format identity --tiktoken-pattern v1"),
    Trial("--disable-msc"),
)

_OPTIMIZER = (
    Trial("--apply-wd-to-qk-layernorm", "--qk-layernorm", own_start=True),
    Trial("--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6", own_start=True),
    Trial("--sgd-momentum 0.8", "--optimizer sgd", own_start=True),
    Trial("--optimizer sgd", own_start=True),
    Trial("--no-weight-decay-cond-type apply_wd_to_qk_layernorm", "--qk-layernorm", own_start=True),
    Trial(
        "--lr-wsd-decay-style cosine --lr-wsd-decay-iters 4", "--lr-decay-style WSD", own_start=True
    ),
    Trial(
        "--lr-decay-samples 80 --lr-warmup-samples 16 --lr-warmup-init 1e-5",
        "--train-samples 56",
        _SAMPLES,
        own_start=True,
    ),
    Trial(
        "--lr-wsd-decay-samples 24",
        "--lr-decay-style WSD --train-samples 56 --lr-decay-samples 80",
        _SAMPLES,
        own_start=True,
    ),
    Trial("--lr-warmup-fraction 0.2", own_start=True),
    Trial("--override-opt-param-scheduler", "--lr 2e-3"),
    Trial("--use-checkpoint-opt-param-scheduler", "--lr 2e-3"),
    Trial(
        "--start-weight-decay 0.01 --end-weight-decay 0.1 --weight-decay-incr-style linear",
        own_start=True,
    ),
    Trial("--decoupled-lr 2e-3 --decoupled-min-lr 1e-4", own_start=True),
    Trial("--loss-scale 16", "--fp16", own_start=True),
    Trial(
        "--initial-loss-scale 1024 --min-loss-scale 2 --loss-scale-window 2 --hysteresis 1",
        "--fp16",
        own_start=True,
    ),
    Trial("--no-use-layer-wise-param-layout"),
    Trial("--lion-beta1 0.9 --lion-beta2 0.95"),
    Trial("--freeze-all-layers", "--no-load-optim"),
)

_LOOP = (
    Trial("--train-samples 56", without=_SAMPLES, own_start=True),
    Trial("--exit-duration-in-mins 500 --manual-gc --manual-gc-interval 2 --no-manual-gc-eval"),
    Trial("--exit-signal-handler --exit-signal SIGUSR2 --exit-signal-handler-for-dataloader"),
    Trial("--exit-signal-handler-for-training"),
    Trial("--iterations-to-skip 4"),
    Trial("--empty-unused-memory-level 2 --train-sync-interval 2"),
    Trial("--check-weight-hash-across-dp-replicas-interval 2"),
    Trial("--result-rejected-tracker-filename {folder}/rejected", "--rerun-mode validate_results"),
    Trial("--start-eval-at-iter 4", "--eval-interval 2"),
    Trial("--skip-train"),
    Trial(
        "--full-validation --multiple-validation-sets --validation-set-names b c",
        "--train-data-path {texts}_a --valid-data-path {texts}_b {texts}_c --eval-interval 2",
        _TEXTS,
        texts=True,
    ),
    Trial("--test-mode --distributed-timeout-seconds-after-init 500"),
    Trial("--no-check-for-nan-in-loss-and-grad"),
    Trial("--check-for-large-grads --check-for-spiky-loss", "--rerun-mode validate_results"),
    Trial("--error-injection-rate 1000 --error-injection-type correct_result"),
    Trial("--calc-ft-timeouts --ft-num-warmup-iters 2 --adlr-autoresume-interval 2"),
    Trial(
        "--fault-injector-num-ranks 1 --fault-injector-fault-types SIGKILL "
        "--fault-injector-fault-probabilities 1.0 --fault-injector-fault-delay 5000 "
        "--fault-injector-delay-start-iteration 100 --fault-injector-seed 3 "
        "--fault-injector-ranks 0",
    ),
    Trial("--rampup-batch-size 4 2 16", without="--exit-interval", own_start=True),
    Trial("--decrease-batch-size-if-needed", "--rampup-batch-size 4 2 16", own_start=True),
    Trial("--step-batch-size-schedule 0:4,16:8", "--train-samples 56", _SAMPLES, own_start=True),
    Trial("--eval-global-batch-size 4 --eval-micro-batch-size 2", "--eval-interval 2"),
)

_CHECKPOINTS = (
    Trial("--save-retain-interval 4 --no-ckpt-fully-parallel-save", _SAVE),
    Trial("--load-main-params-from-ckpt", "--no-load-optim --bf16", own_start=True),
    Trial("--pretrained-checkpoint {start}", without="--load"),
    Trial("--ckpt-step 2"),
    Trial("--use-checkpoint-args --no-use-tokenizer-model-from-checkpoint-args"),
    Trial("--use-mp-args-from-checkpoint-args", "--use-checkpoint-args"),
    Trial("--exit-on-missing-checkpoint --auto-detect-ckpt-format"),
    Trial("--async-save --async-ckpt-cpu-priority 9 --async-ckpt-io-priority 2", _SAVE),
    Trial("--use-persistent-ckpt-worker", f"--async-save {_SAVE}"),
    Trial("--async-strategy mcore --async-ckpt-use-cpu-shm", f"--async-save {_SAVE}"),
    Trial(
        "--ckpt-fully-parallel-load --ckpt-fully-parallel-load-exchange-algo gather_rounds "
        "--ckpt-fully-parallel-save-process-group ep_dp "
        "--ckpt-fully-parallel-load-process-group ep_dp",
        _SAVE,
    ),
    Trial("--ckpt-assume-constant-structure --dist-ckpt-workers 2 --verify-integrity", _SAVE),
    Trial("--no-ckpt-load-validate-sharding-integrity --dist-ckpt-strictness log_all"),
    Trial(
        "--distrib-optim-fully-reshardable-mem-efficient",
        f"--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable {_SAVE}",
        own_start=True,
    ),
    Trial("--no-stream-ckpt-dequant --override-ckpt-iteration 2"),
    Trial("--no-save-optim --no-save-rng", _SAVE),
    Trial("--no-load-optim --no-load-rng"),
    Trial("--use-dist-ckpt --dist-ckpt-format torch_dist --ckpt-fully-parallel-save", _SAVE),
    Trial("--non-persistent-save-interval 2 --non-persistent-global-ckpt-dir {folder}", _SAVE),
)

_LAYERS = (
    Trial("--kv-channels 8", own_start=True),
    Trial("--fp32-residual-connection", "--bf16", own_start=True),
    Trial("--apply-residual-connection-post-layernorm --norm-epsilon 1e-4", own_start=True),
    Trial("--add-qkv-bias", "--disable-bias-linear", own_start=True),
    Trial("--glu-linear-offset 1.0 --activation-func-clamp-value 7.0", _GELU, own_start=True),
    Trial("--rotary-interleaved --rotary-base 5000 --rotary-percent 0.5", _ROPE, own_start=True),
    Trial("--rotary-seq-len-interpolation-factor 2", _ROPE, own_start=True),
    Trial("--use-rope-scaling --rope-scaling-factor 4.0", _ROPE, own_start=True),
    Trial("--no-rope-freq 2", f"{_ROPE}", own_start=True),
    Trial("--qk-layernorm", own_start=True),
    Trial("--qk-l2-norm", own_start=True),
    Trial("--attention-output-gate", own_start=True),
    Trial("--softmax-type off-by-one", own_start=True),
    Trial("--softmax-type learnable", own_start=True),
    Trial("--window-size 8,0 --window-attn-skip-freq 2"),
    Trial(
        "--yarn-original-max-position-embeddings 16 --yarn-beta-fast 16 --yarn-beta-slow 2 "
        "--no-yarn-correction-range-round-to-int",
        "--position-embedding-type yarn --rotary-scaling-factor 2.0",
        own_start=True,
    ),
    Trial("--relative-attention-num-buckets 16 --relative-attention-max-distance 64"),
    Trial("--no-position-embedding", own_start=True),
    Trial("--squared-relu", own_start=True),
    Trial("--quick-geglu", own_start=True),
    Trial("--attention-softmax-in-fp32 --apply-query-key-layer-scaling", "--fp16", own_start=True),
    Trial("--disable-bf16-reduced-precision-matmul", "--bf16", own_start=True),
    Trial(
        "--q-lora-rank 24 --kv-lora-rank 16 --rotary-scaling-factor 2.0 --mscale 0.7 "
        "--mscale-all-dim 0.7 --rope-type rope",
        _LATENT,
        own_start=True,
    ),
    Trial("--qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 24", _LATENT, own_start=True),
    Trial("--disable-jit-fuser --no-masked-softmax-fusion --no-bias-gelu-fusion"),
    Trial("--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion"),
    Trial("--no-persist-layer-norm"),
    # with a scale at which the first steps are taken: a checkpoint without any cannot be loaded
    Trial(
        "--fp16-lm-cross-entropy",
        "--fp16 --initial-loss-scale 1024",
        own_start=True,
        keeps_vocabulary=True,
    ),
    Trial("--mtp-loss-scaling-factor 0.3", f"--mtp-num-layers 1 {_ROPE}", own_start=True),
    Trial("--moe-layer-freq 2", _EXPERTS, own_start=True),
    Trial(
        "--moe-shared-expert-gate",
        f"--moe-shared-expert-intermediate-size 64 {_EXPERTS}",
        own_start=True,
    ),
    Trial("--moe-router-num-groups 2 --moe-router-group-topk 1", _EXPERTS, own_start=True),
    Trial(
        "--moe-router-pre-softmax --moe-router-topk-scaling-factor 2.0 --moe-router-dtype fp32 "
        "--moe-z-loss-coeff 1e-3",
        _EXPERTS,
        own_start=True,
    ),
    Trial(
        "--moe-router-bias-update-rate 0.01",
        f"--moe-router-enable-expert-bias --moe-router-score-function sigmoid {_EXPERTS}",
        own_start=True,
    ),
    Trial(
        "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
        "--moe-token-drop-policy position",
        f"--moe-token-dispatcher-type alltoall {_EXPERTS}",
        own_start=True,
    ),
    Trial("--moe-apply-probs-on-input", f"{_EXPERTS} --moe-router-topk 1", own_start=True),
    Trial("--moe-latent-size 32", _EXPERTS, own_start=True),
    Trial("--moe-input-jitter-eps 0.01", _EXPERTS, own_start=True),
    Trial("--moe-router-force-load-balancing", _EXPERTS, own_start=True),
    Trial("--moe-router-force-biased 0.5", _EXPERTS, own_start=True),
    Trial("--deterministic-mode"),
    Trial("--mlp-chunks-for-training 2"),
    Trial("--no-clone-scatter-output-in-embedding"),
)

_WEIGHTS = (
    Trial("--init-method-std 0.05 --embedding-init-method-std 0.03", own_start=True),
    Trial("--init-method-xavier-uniform", own_start=True),
    Trial("--no-initialization", own_start=True),
    Trial("--use-cpu-initialization"),
    Trial(
        "--use-mup --mup-base-hidden-size 32 --mup-embedding-mult 2.0 --mup-output-mult 2.0 "
        "--mup-base-head-dim 8 --mup-attn-scale-power 0.5",
        own_start=True,
    ),
    Trial("--use-mup --mup-width-mult 2.0", own_start=True),
)

_MESSAGES = (
    Trial("--use-ring-exchange-p2p"),
    Trial("--no-overlap-p2p-communication --no-scatter-gather-tensors-in-pipeline"),
    Trial("--overlap-p2p-communication-warmup-flush"),
    Trial("--delay-wgrad-compute"),
    Trial("--distributed-backend gloo --use-tp-pp-dp-mapping"),
    Trial("--disable-gloo-process-groups"),
)

_GRADIENTS = (
    Trial("--grad-reduce-in-bf16", "--bf16", own_start=True),
    Trial("--accumulate-allreduce-grads-in-fp32", "--bf16", own_start=True),
    Trial(
        "--ddp-num-buckets 3 --ddp-average-in-collective --no-align-grad-reduce "
        "--no-gradient-reduce-div-fusion",
        "--overlap-grad-reduce",
    ),
    Trial(
        "--ddp-bucket-size 10000 --ddp-pad-buckets-for-high-nccl-busbw",
        "--overlap-grad-reduce --use-distributed-optimizer",
        own_start=True,
    ),
    Trial(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "--use-distributed-optimizer --bf16 --grad-reduce-in-bf16",
        own_start=True,
    ),
    Trial(
        "--ddp-param-name-patterns-for-fp32-local-accumulation all",
        "--bf16 --grad-reduce-in-bf16",
        own_start=True,
    ),
)

# What only something else reads: inference, reinforcement learning, other scripts, sharded weights.
_UNREAD = (
    Trial(
        "--wgrad-deferral-limit 3 --offload-modules core_attn --min-offloaded-tensor-size 10 "
        "--delta-offload-bytes-across-pp-ranks 10 --activation-offload-fraction 0.5 "
        "--fine-grained-offloading-max-inflight-offloads 2 --moe-upcycling-granularity 2 "
        "--outer-dp-sharding-strategy no_shard --suggested-communication-unit-size 100 "
        "--keep-fp8-transpose-cache --data-parallel-sharding-strategy optim "
        "--torch-fsdp2-no-reshard-after-forward --megatron-fsdp-main-params-dtype bf16 "
        "--megatron-fsdp-main-grads-dtype bf16 --megatron-fsdp-grad-comm-dtype bf16 "
        "--megatron-fsdp-max-pool-double-buffer --fsdp-db-use-persist-buf-on-alloc-fail "
        "--no-strict-fsdp-dtensor-load --megatron-fsdp-enable-fine-grained-param-gather "
        "--fsdp-double-buffer"
    ),
    Trial(
        "--inprocess-max-iterations 2 --inprocess-monitor-thread-interval 2 "
        "--inprocess-monitor-process-interval 2 --inprocess-progress-watchdog-interval 2 "
        "--inprocess-heartbeat-interval 20 --inprocess-soft-timeout 50 "
        "--inprocess-hard-timeout 80 --inprocess-heartbeat-timeout 50 "
        "--inprocess-barrier-timeout 100 --inprocess-completion-timeout 100 "
        "--inprocess-last-call-wait 2 --inprocess-termination-grace-time 2 "
        "--inprocess-granularity rank --inprocess-active-world-size 2 "
        "--inprocess-empty-cuda-cache"
    ),
    Trial(
        "--rl-prompts-per-eval 8 --grpo-prompts-per-step 8 --grpo-group-size 4 "
        "--rl-generation-lag 1 --grpo-iterations 3 --grpo-clamp-eps-lower 0.02 "
        "--grpo-clamp-eps-upper 0.02 --grpo-kl-beta 0.01 --grpo-entropy-term-weight 0.1 "
        "--grpo-filter-groups-with-same-reward --langrl-env-config x --rl-default-temperature 0.5 "
        "--rl-default-top-p 0.5 --rl-default-top-k 5 --rl-partial-rollouts "
        "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 2.0 "
        "--rl-sequence-packing-max-sequences-per-bin 20 --rl-sequence-packing-algo round-robin "
        "--rl-verify-model-weights-swap --rl-skip-bos-token --rl-profile "
        "--rl-profile-dir {folder} --rl-inference-parsers qwen3 --rl-parallel-generation-tasks 4 "
        "--rl-num-parallel-generations 4 --langrl-external-server "
        "--langrl-inference-server-conversation-template x "
        "--rl-offload-optimizer-during-inference"
    ),
    Trial(
        "--logits-save-top-k 8 --logits-save-top-p-min-k 2 --logits-save-dtype bf16 "
        "--logits-load-decode-threads 2 --logits-load-prefetch-factor 2 "
        "--logits-load-msc-prefetch-depth 3 --logits-load-kd-loss-alpha 0.5 "
        "--logits-load-ignore-errors"
    ),
    Trial(
        "--inference-batch-times-seqlen-threshold 10 --max-tokens-to-oom 100 "
        "--output-bert-embeddings --bert-embedder-type huggingface --use-legacy-static-engine "
        "--inference-max-requests 4 --inference-max-seq-length 100 "
        "--inference-dynamic-batching-buffer-size-gb 1.0 "
        "--inference-dynamic-batching-paused-buffer-size-gb 1.0 "
        "--inference-dynamic-batching-mamba-memory-ratio 0.5 "
        "--inference-dynamic-batching-block-size 128 "
        "--inference-dynamic-batching-max-requests 8 --inference-dynamic-batching-max-tokens 100 "
        "--inference-dynamic-batching-num-cuda-graphs 4 "
        "--inference-dynamic-batching-track-paused-request-events "
        "--inference-dynamic-batching-track-generated-token-events "
        "--inference-dynamic-batching-unified-memory-level 1 "
        "--inference-dynamic-batching-prefix-caching "
        "--inference-dynamic-batching-prefix-caching-eviction-policy lru "
        "--inference-dynamic-batching-prefix-caching-routing-alpha 0.4 "
        "--inference-dynamic-batching-prefix-caching-mamba-gb 1.0 "
        "--inference-dynamic-batching-cuda-graph-mixed-prefill-count 4 "
        "--inference-dynamic-batching-sampling-backend flashinfer "
        "--inference-logging-step-interval 2 --inference-text-gen-server-logging "
        "--inference-wandb-logging --inference-coordinator-port 12345 "
        "--inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus "
        "--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend torch "
        "--inference-moe-disable-fused-quant-kernels "
        "--inference-moe-token-dispatcher-type nccl --enable-chunked-prefill "
        "--num-speculative-tokens 2 --use-same-sampling-seed-across-dp-ranks "
        "--mamba-inference-conv-states-dtype fp32 --mamba-inference-ssm-states-dtype fp32 "
        "--mlp-chunks-for-prefill 2 --decode-only-cuda-graphs "
        "--inference-cuda-graph-max-tokens 100 --inference-cuda-graph-all-prefills"
    ),
    Trial(
        "--bert-no-binary-head --ict-head-size 8 --biencoder-projection-dim 8 "
        "--biencoder-shared-query-context-model --ict-load x --bert-load x --titles-data-path x "
        "--query-in-block-prob 0.2 --use-one-sent-docs --evidence-data-path x "
        "--retriever-report-topk-accuracies 1 2 --retriever-score-scaling --block-data-path x "
        "--embedding-path x --indexer-batch-size 8 --indexer-log-interval 8 --num-classes 10 "
        "--num-channels 1 --classes-fraction 0.5 --data-per-class-fraction 0.5 "
        "--no-data-sharding --head-lr-mult 2.0 --vision-pretraining-type inpaint "
        "--vision-backbone-type mit --swin-backbone-type base --mask-type row "
        "--mask-factor 0.5 --iter-per-epoch 10 --dino-local-img-size 48 "
        "--dino-local-crops-number 4 --dino-head-hidden-size 32 --dino-bottleneck-size 16 "
        "--dino-freeze-last-layer 2 --dino-norm-last-layer --dino-warmup-teacher-temp 0.05 "
        "--dino-teacher-temp 0.08 --dino-warmup-teacher-temp-epochs 3"
    ),
    Trial(
        "--use-mcore-models --use-flash-attn --local-rank 0 --fp8-interval 2 "
        "--enable-experimental --no-tp-comm-split-ag --no-tp-comm-split-rs --lazy-mpu-init"
    ),
    Trial("--no-async-tensor-model-parallel-allreduce"),
    Trial("--moe-router-padding-for-fp8 --moe-use-legacy-grouped-gemm", _EXPERTS, own_start=True),
    Trial("--spec local"),
)

TRIALS = (
    *_LOGS,
    *_DATA,
    *_OPTIMIZER,
    *_LOOP,
    *_CHECKPOINTS,
    *_LAYERS,
    *_WEIGHTS,
    *_MESSAGES,
    *_GRADIENTS,
    *_UNREAD,
)
