"""What Megatron takes for granted of a GPU and finds on a CPU, too."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_zb.cpu_ranks.adam import redirect_adam
from megatron_zb.cpu_ranks.megatron_parts import keep_messages, sum_norms_in_single_precision

_NUMBERS, _MESSAGES = 8192, 64


def _numbers_that_come(rank: int) -> list[float]:
    """Give every activation away when its sending has begun, as interleaved 1F1B does."""
    from megatron.core.pipeline_parallel import p2p_communication, schedules

    keep_messages()
    nothing = dict.fromkeys(
        ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
    )
    ranks = {"prev_pipeline_rank": 1 - rank, "next_pipeline_rank": 1 - rank}

    def start(**tensors: torch.Tensor) -> Any:
        options = {**nothing, **tensors, **ranks}
        return p2p_communication._p2p_ops(**options, group=dist.group.WORLD)

    if rank == 0:
        handles = []
        for number in range(_MESSAGES):
            output = torch.full((_NUMBERS,), float(number), requires_grad=True) + 0
            handles.append(start(tensor_send_next=output))
            schedules.deallocate_output_tensor(output, True)
        others = [torch.full((_NUMBERS,), -1.0) for _ in range(_MESSAGES)]
        dist.barrier()
        for handle in handles:
            handle["send_next"].wait()
        return [other[0].item() for other in others[:1]]
    dist.barrier()
    found = []
    for _ in range(_MESSAGES):
        buffer = torch.empty(_NUMBERS)
        start(tensor_recv_prev=buffer)["recv_prev"].wait()
        low, high = buffer.aminmax()
        found += [low.item(), high.item()]
    return found


def numbers_that_come() -> list[float]:
    return _numbers_that_come(dist.get_rank())


def test_an_activation_that_was_given_away_is_sent_whole(ranks: Any) -> None:
    _, found = ranks(2).run(numbers_that_come)
    assert found == [float(number) for number in range(_MESSAGES) for _ in range(2)]


def norm_of_halves() -> tuple[float, float]:
    """The norm of 16-bit tensors by Megatron's function, and by torch in 64 bits."""
    from megatron.core import utils

    sum_norms_in_single_precision()
    torch.manual_seed(0)
    tensors = [(scale * torch.randn(50, 20)).half() for scale in (0.1, 0.5, 1.0)]
    found, _ = utils.local_multi_tensor_l2_norm(0, None, [tensors], False)
    return found.item(), torch.cat(tensors).double().norm().item()


def logged_by_a_fork(warning: str) -> list[str]:
    """What Megatron's tracker logs where a forward draws, and a warning of the same module."""
    from megatron.core.tensor_parallel import random as megatron_random

    logger, messages = logging.getLogger(megatron_random.__name__), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    tracker = megatron_random.CudaRNGStatesTracker()
    tracker.add("drawing", 1)
    with tracker.fork("drawing"):
        torch.rand(1)
    logger.warning(warning)
    return messages


def test_the_generator_of_the_cpu_is_no_reason_to_warn(ranks: Any) -> None:
    """A forward that draws changes it, since it is CUDA's, too."""
    assert ranks(2).run(logged_by_a_fork, warning="another") == [["another"]] * 2


def test_norms_of_16_bits_are_not_rounded_to_16_bits(ranks: Any) -> None:
    for found, exact in ranks(2).run(norm_of_halves):
        assert found == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("parameters", [0, 2])
def test_an_optimizer_tells_its_steps_with_and_without_parameters(
    parameters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)  # which is restored afterwards
    redirect_adam()
    held = [torch.nn.Parameter(torch.ones(2)) for _ in range(parameters)]
    optimizer = torch.optim.AdamW([{"params": held}])
    for _ in range(2):
        for parameter in held:
            parameter.grad = torch.ones(2)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    assert [each["step"].item() for each in state.values()] == [2.0] * max(1, parameters)
    for parameter in held:  # as a resume may set it
        optimizer.state[parameter]["step"] = torch.tensor(7.0)
        parameter.grad = torch.ones(2)
    assert optimizer.step(lambda: 5.0) == 5.0
    assert optimizer.param_groups[0]["step"] == (8 if parameters else 3)


def test_an_optimizer_loads_moments_of_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Megatron stores them where fp16 has skipped every step so far."""
    monkeypatch.setattr(torch.optim, "AdamW", torch.optim.AdamW)  # which is restored afterwards
    redirect_adam()
    weight = torch.nn.Parameter(torch.ones(2))
    state = torch.optim.AdamW([weight]).state_dict()
    assert state["state"][0].pop("step") == 0
    optimizer = torch.optim.AdamW([weight])
    optimizer.load_state_dict(state)
    weight.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
