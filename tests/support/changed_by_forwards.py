"""What forwards of Megatron's modules change, and whether a feature leaves it with the same values.

Small models run a few steps on two ranks; nothing is listed by hand. Those of Transformer-Engine's
layers run over stand-ins for its kernels, see te_stand_in.py. Objects of its classes are looked
into as well, such as the histories of maxima of fp8.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import gpt_cases
import torch
from gpt_cases import GPTCase, built, forward_backward, microbatches
from joined_pairs import joined
from model_options import EXPERTS, MAMBA, RECOMPUTED, SELECTIVE
from rank_process import Kind
from ranks import RankFailure, RankPool
from recompute_offload import with_recompute_offload
from te_models import OPTIONS_OF_LATENT

from megatron_zb import schedules
from megatron_zb.errors import UsageError
from megatron_zb.megatron_core import forward_state
from megatron_zb.megatron_core.forward_state import StatePart
from megatron_zb.megatron_core.refusals import Asked, refusals
from megatron_zb.runtime.saved_state import StatePlace
from megatron_zb.schedules import Schedule

M, STEPS = 4, 2
FEATURES = ("recomputation", "offload", "slices", "pairs", "verify")
"""Each as a column of the table; a run without it is compared with."""


def _experts(**options: Any) -> GPTCase:
    return GPTCase(options=tuple({**EXPERTS, **options}.items()))


CASES = {
    "dense": GPTCase(),
    "rotary": GPTCase(rotary=True),
    "latent attention": GPTCase(
        rotary=True,
        options=(
            ("multi_latent_attention", True),
            ("q_lora_rank", 16),
            ("kv_lora_rank", 16),
            ("qk_head_dim", 4),
            ("qk_pos_emb_head_dim", 4),
            ("v_head_dim", 8),
            ("kv_channels", 8),
            ("rope_type", "rope"),
            ("add_bias_linear", False),
        ),
    ),
    "prediction layer": GPTCase(rotary=True, multi_token=1),
    "aux_loss": _experts(moe_z_loss_coeff=0.01),
    "seq_aux_loss": _experts(moe_router_load_balancing_type="seq_aux_loss"),
    "global_aux_loss": _experts(moe_router_load_balancing_type="global_aux_loss"),
    "sinkhorn": _experts(
        moe_router_load_balancing_type="sinkhorn",
        moe_aux_loss_coeff=0.0,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
    ),
    "expert bias": _experts(
        moe_router_load_balancing_type="seq_aux_loss",
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    ),
    "capacity": _experts(
        moe_expert_capacity_factor=1.0, moe_token_drop_policy="probs", moe_router_pre_softmax=True
    ),
    "shared expert": _experts(moe_shared_expert_intermediate_size=32),
    "allgather dispatcher": _experts(moe_token_dispatcher_type="allgather"),
    "selective recomputation": GPTCase(options=SELECTIVE),
    "full recomputation": GPTCase(options=RECOMPUTED),
    "hybrid": GPTCase(
        hybrid="M*-E",
        options=(*EXPERTS.items(), *MAMBA),
    ),
}

_GROUPED = {**EXPERTS, "moe_grouped_gemm": True}


def _in_fp8(recipe: str, *options: tuple[str, Any]) -> GPTCase:
    fp8 = (("fp8", "hybrid"), ("fp8_recipe", recipe))
    return GPTCase(dtype="bfloat16", fused_accumulation=True, options=(*options, *fp8))


CASES_OF_TE = {
    "dense": GPTCase(fused_accumulation=True),
    "latent attention": GPTCase(rotary=True, options=OPTIONS_OF_LATENT),
    "grouped experts": GPTCase(options=tuple(_GROUPED.items())),
    "fp8 delayed": _in_fp8("delayed"),
    "fp8 tensorwise": _in_fp8("tensorwise"),
    "fp8 delayed grouped experts": _in_fp8("delayed", *_GROUPED.items()),
}
OF_TE = ".transformer-engine"
"""In the names of results of these."""


class Change(NamedTuple):
    """A value that forwards change: whose, of what kind, and how."""

    owner: str
    name: str
    kind: str
    how: str


Values = dict[str, tuple[Change, Any]]
"""What forwards of a rank change, by its path, with the value after the passes of the last step."""


def values(case: GPTCase, schedule: str | Schedule, verifies: bool = False) -> Values | str:
    """Return what forwards change on this rank, or the refusal of the case."""
    try:
        return _values(case, schedule, verifies)
    except (UsageError, NotImplementedError) as error:
        return str(error)


def values_of_te(case: GPTCase, schedule: str | Schedule, verifies: bool = False) -> Values | str:
    """Return what forwards of Transformer-Engine's layers change, or the refusal of the case."""
    from te_models import layers_of_te
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    with (
        patch.object(gpt_cases, "_specification", layers_of_te),
        patch.object(forward_state, "_is_followed", _is_followed_in_te),
    ):
        return values(case, schedule, verifies)


_IS_FOLLOWED = forward_state._is_followed


def _is_followed_in_te(value: Any, package: str) -> bool:
    """Return whether an object is looked into: also those of Transformer-Engine in modules."""
    is_of_te = type(value).__module__.startswith("transformer_engine.pytorch")
    if package in ("megatron", "transformer_engine") and is_of_te:
        return hasattr(value, "__dict__") and not isinstance(value, type | torch.Tensor)
    return _IS_FOLLOWED(value, package)


def _values(case: GPTCase, schedule: str | Schedule, verifies: bool) -> Values:
    found: Values = {}
    with (
        patch.object(forward_state, "_refusal", lambda step: "{}"),  # to look at every forward
        patch.object(forward_state, "_refuse_users_state", lambda step, places, refusal: None),
        built(case, schedule, M) as (adapter, chunks),
    ):
        assert adapter is not None
        if verifies:
            adapter.verify()
        states = adapter.part(StatePart).states
        config = chunks[0].config
        finalize = config.finalize_model_grads_func

        def look(*arguments: Any, **options: Any) -> Any:
            for number, state in states.items():
                for place in state.places:
                    change = _change(state.model, place)
                    found[f"{number}:{place.label}"] = change, _plain(place.value)
            return finalize(*arguments, **options)

        config.finalize_model_grads_func = look
        for step in range(STEPS):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            data = [microbatches(case, M, step * M) for _ in chunks]
            forward_backward(adapter.forward_backward_func, chunks, data, M)
    return found


_NUMBERED = re.compile(r"(\[|\bweight)\d+")


def _change(model: Any, place: StatePlace) -> Change:
    owner: Any = model
    at, names = owner, list[str]()
    for name in place.label.split("."):
        names.append(name)
        inner = at if isinstance(at, dict) else {**vars(at), **vars(at).get("_modules", {})}
        at = inner.get(name, {})
        if at is not place.value and not isinstance(at, dict) and hasattr(at, "__dict__"):
            owner, names = at, []
    how = "updated in place" if place.is_changed_in_place else "set anew"
    kind = "buffer" if place.is_buffer else _kind(place.value)
    if not place.is_state:
        how = "scratch"
    name = _NUMBERED.sub(r"\1*", ".".join(names))  # weights of experts, and their quantizers
    return Change(type(owner).__name__, name, kind, how)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "tensor"
    return "number" if isinstance(value, int | float) else "object"


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().float().clone()
    return value if isinstance(value, int | float | str | tuple) else type(value).__name__


def runs(case: GPTCase) -> dict[str, tuple[GPTCase, str | Schedule, bool]]:
    """Return the runs of a case: without a feature, and with each that there is for it."""
    kept = schedules.build("v-half", pipeline_size=2, num_microbatches=M)
    found: dict[str, tuple[GPTCase, str | Schedule, bool]] = {
        "": (case, kept, False),
        "recomputation": (case, with_recompute_offload(kept, 6, recompute=0.6), False),
        "offload": (case, with_recompute_offload(kept, 6, offload=0.6), False),
        "slices": (replace(case, slices="2"), "v-half", False),
        "verify": (case, kept, True),
    }
    if dict(case.options).get("moe_token_dispatcher_type") == "alltoall":
        half = replace(case, dtype="bfloat16", data_parallel=2, expert_parallel=2)
        found["bf16"] = half, kept, False
        found["pairs"] = replace(half, all_to_all_overlaps=True), joined(kept), False
    return found


def verdicts(
    pools: Callable[[int, Kind], RankPool], name: str, kind: Kind = Kind.HOSTILE
) -> Iterator[tuple[Change, dict[str, str]]]:
    """Return each change of a case with what each feature leaves: equal or other values."""
    of_te = kind is Kind.TRANSFORMER_ENGINE
    case = CASES_OF_TE[name] if of_te else CASES[name]
    run = partial(_run, values_of_te if of_te else values)
    found = {
        feature: [refusal] * 2
        if (refusal := _refusal(case, feature))
        else run(pools(2 * case.data_parallel, kind), case=case, schedule=s, verifies=verifies)
        for feature, (case, s, verifies) in runs(case).items()
    }
    for features, reference in ((FEATURES, ""), (("pairs",), "bf16")):
        for rank, usual in enumerate(found.get(reference, [])):
            assert not isinstance(usual, str), usual
            for path, (change, _) in usual.items():
                yield (
                    change,
                    {
                        feature: _verdict(path, usual, found[feature][rank])
                        for feature in features
                        if feature in found and (feature == "pairs") == (reference == "bf16")
                    },
                )


_FLAGS: dict[str, dict[str, Any]] = {
    "recompute": {"pipeline_recompute": "auto"},
    "offload": {"pipeline_offload": "auto"},
    "verify": {"pipeline_verify": True},
}


def _refusal(case: GPTCase, feature: str) -> str:
    """Return why arguments of a training cannot ask for a feature, nothing if they can."""
    name = {"recomputation": "recompute"}.get(feature, feature)
    if name not in _FLAGS:
        return ""
    asked = Asked(args=SimpleNamespace(**dict(case.options), **_FLAGS[name]), choice="a schedule")
    found = next(refusals(asked, only=(name,)), None)
    return "" if found is None else str(found.error)


def _run(function: Callable[..., Any], pool: RankPool, **arguments: Any) -> list[Values | str]:
    """Return what each rank has found, or the error that has ended the run."""
    try:
        results: list[Values | str] = pool.run(function, timeout=60.0, **arguments)
    except RankFailure as error:
        line = str(error).partition("\n")[0]
        print(f"{arguments['case']}: {line}", file=sys.stderr)
        return [line] * pool.world_size
    return results


def _verdict(path: str, usual: Values, ours: Values | str) -> str:
    if isinstance(ours, str):
        return "refused"
    if path not in ours:
        return "unchanged"
    (change, expected), (_, value) = usual[path], ours[path]
    if change.how == "scratch":
        return "scratch"
    if isinstance(expected, torch.Tensor) and isinstance(value, torch.Tensor):
        same = expected.shape == value.shape and torch.equal(expected, value)
    else:
        same = type(expected) is type(value) and expected == value
    return "equal" if same else "other"
