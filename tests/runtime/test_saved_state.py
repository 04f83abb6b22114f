"""Values of tensors whose classes dispatch themselves, as those of quantized or sharded tensors."""

from __future__ import annotations

import torch
from torch.testing._internal.two_tensor import TwoTensor

from megatron_zb.runtime.saved_state import Saved, StatePlace


def test_a_tensor_that_every_forward_sets_is_not_watched() -> None:
    place = StatePlace({"scratch": TwoTensor(torch.ones(2), torch.ones(2))}, "scratch", "", True)
    assert not place.may_be_scratch
    assert place.is_state


def test_a_tensor_that_is_updated_in_place_is_put_back() -> None:
    average = TwoTensor(torch.ones(2), torch.ones(2))
    place = StatePlace({"average": average}, "average", "average", True)
    saved = Saved(place, copies=True, keeps=True)
    average.mul_(3)
    place.is_changed_in_place = bool(saved.change())
    saved.put_back()
    assert place.value is average
    assert torch.equal(average.a, torch.ones(2)) and torch.equal(average.b, torch.ones(2))
