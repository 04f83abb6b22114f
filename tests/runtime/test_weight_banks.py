"""Two generations of weights: which one the parameters are, and what gradients they give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch

from megatron_zb.runtime.weight_banks import WeightBanks

HOMES = pytest.mark.parametrize("keeps_home", [False, True])


def two_parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((2, 3), 1.0)), torch.nn.Parameter(torch.full((4,), 10.0))]


def values(parameters: list[torch.nn.Parameter]) -> list[float]:
    """The value of each parameter, all of whose elements are equal."""
    assert all(bool((it == it.flatten()[0]).all()) for it in parameters)
    return [float(it.detach().flatten()[0]) for it in parameters]


def adding(parameters: list[torch.nn.Parameter], amount: float) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            for it in parameters:
                it.add_(amount)

    return step


@HOMES
def test_the_newest_weights_and_those_before_are_kept(keeps_home: bool) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    assert banks.updates == 0
    banks.select(0)
    assert values(parameters) == [1.0, 10.0]
    for update in range(1, 6):
        banks.select(max(update - 2, 0))  # a pass of the group before may have run last
        banks.update(adding(parameters, update))
        assert banks.updates == update
        newest = sum(range(update + 1))
        for updates, added in ((update, newest), (update - 1, newest - update)) * 2:
            banks.select(updates)
            assert values(parameters) == [1.0 + added, 10.0 + added]


@HOMES
def test_weights_that_are_not_kept_are_refused(keeps_home: bool) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    for updates in (-1, 1, 2):
        with pytest.raises(ValueError, match=f"after {updates} updates .* there have been 0"):
            banks.select(updates)
    for _ in range(3):
        banks.update(adding(parameters, 1.0))
    banks.select(2)
    for updates in (-1, 0, 1, 4):
        with pytest.raises(ValueError, match=f"after {updates} updates .* there have been 3"):
            banks.select(updates)
    assert values(parameters) == [3.0, 12.0], "what has been refused changes nothing"


@HOMES
def test_the_newest_weights_are_where_everybody_expects_them(keeps_home: bool) -> None:
    """An optimizer that keeps its parameters in one buffer writes there, and reads there."""
    parameters = two_parameters()
    places = [it.data_ptr() for it in parameters]
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    seen: list[list[int]] = []

    def step() -> None:
        seen.append([it.data_ptr() for it in parameters])
        adding(parameters, 1.0)()

    for update in range(1, 4):
        banks.select(max(update - 2, 0))
        banks.update(step)
        assert (seen.pop() == places) is (keeps_home or update % 2 == 0)
        banks.select(update - 1)
        assert values(parameters) == [float(update), 9.0 + update]
        banks.rest()
        assert values(parameters) == [1.0 + update, 10.0 + update]
        here = [it.data_ptr() for it in parameters]
        assert (here == places) is (keeps_home or update % 2 == 0)


@HOMES
def test_older_weights_can_be_forgotten(keeps_home: bool) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    banks.update(adding(parameters, 5.0))
    banks.forget_older()
    for updates in (0, 1):
        banks.select(updates)
        assert values(parameters) == [6.0, 15.0]
    banks.update(adding(parameters, 1.0))
    banks.select(1)
    assert values(parameters) == [6.0, 15.0], "two storages, and not one twice"
    banks.select(2)
    assert values(parameters) == [7.0, 16.0]


@pytest.mark.parametrize(("keeps_home", "copies"), [(False, 1), (True, 2)])
def test_bytes_beside_the_parameters(keeps_home: bool, copies: int) -> None:
    parameters = [*two_parameters(), torch.nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))]
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    assert banks.num_bytes == copies * (4 * (6 + 4) + 2 * 5)
    assert WeightBanks([], keeps_home=keeps_home).num_bytes == 0


@HOMES
def test_parameters_stay_the_same_objects_with_their_gradients(keeps_home: bool) -> None:
    parameters = two_parameters()
    for it in parameters:
        it.grad = torch.ones_like(it)
    gradients = [it.grad for it in parameters]
    banks = WeightBanks(iter(parameters), keeps_home=keeps_home)
    banks.update(adding(parameters, 1.0))
    banks.select(0)
    assert all(it.grad is gradient for it, gradient in zip(parameters, gradients, strict=True))


# --- graphs


def small_net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3)
    ).double()


def inputs(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def gradients_of(
    net: torch.nn.Module, loss: torch.Tensor, read: torch.Tensor
) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [read, *net.parameters()]))


def descend(net: torch.nn.Module, gradients: list[torch.Tensor]) -> None:
    """Update in place, as optimizers do."""
    with torch.no_grad():
        for it, gradient in zip(net.parameters(), gradients, strict=True):
            it.sub_(gradient, alpha=0.5)


def loss_of(net: torch.nn.Module, read: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = net(read).square().sum()
    return found


@HOMES
def test_a_graph_from_before_an_update_gives_gradients_of_the_old_weights(
    keeps_home: bool,
) -> None:
    """Three groups: F of each on the weights one update fewer, B of the last one behind an update.

    The updates write in place. Each expected gradient is that of a copy of the net, which holds the
    weights of its group alone.
    """
    net = small_net()
    banks = WeightBanks(net.parameters(), keeps_home=keeps_home)
    reads = inputs(5)
    losses: list[torch.Tensor] = []
    expected: list[list[torch.Tensor]] = []

    def forward(group: int) -> None:
        banks.select(max(group - 1, 0))
        alone = copy.deepcopy(net)
        losses.append(loss_of(net, reads[group]))
        expected.append(gradients_of(alone, loss_of(alone, reads[group]), reads[group]))

    def backward(group: int) -> list[torch.Tensor]:
        banks.select(max(group - 1, 0))
        return gradients_of(net, losses[group], reads[group])

    forward(0)
    forward(1)
    for group in range(4):
        found = backward(group)
        for one, other in zip(found, expected[group], strict=True):
            assert torch.equal(one, other)
        banks.update(
            partial(descend, net, found[1:])
        )  # graphs of the next group are there, and stay right
        if group + 2 < len(reads):
            forward(group + 2)
    assert not torch.equal(expected[1][1], expected[2][1])
    assert banks.updates == 4


@HOMES
def test_a_backward_has_its_weights_selected_first(keeps_home: bool) -> None:
    """Autograd saves a view of the weight of a matrix, but the weight of a norm as it is.

    So the latter is in a graph whatever the parameter is when the backward runs.
    """
    net = small_net()
    banks = WeightBanks(net.parameters(), keeps_home=keeps_home)
    (read,) = inputs(1)
    alone = copy.deepcopy(net)
    expected = gradients_of(alone, loss_of(alone, read), read)
    banks.select(0)
    losses = [loss_of(net, read) for _ in range(2)]
    banks.update(adding(list(net.parameters()), 1.0))
    banks.rest()
    assert not torch.equal(gradients_of(net, losses[0], read)[0], expected[0])
    banks.select(0)
    for one, other in zip(gradients_of(net, losses[1], read), expected, strict=True):
        assert torch.equal(one, other)


def test_without_generations_autograd_refuses() -> None:
    """The updates of these tests are ones that a graph of the same storage does not survive."""
    net = small_net()
    (read,) = inputs(1)
    loss = loss_of(net, read)
    adding(list(net.parameters()), 1.0)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(net, loss, read)


@HOMES
def test_versions_do_not_change_with_an_update(keeps_home: bool) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=keeps_home)
    before = [it._version for it in parameters]
    for _ in range(3):
        banks.update(adding(parameters, 1.0))
        assert [it._version for it in parameters] == before


@HOMES
def test_an_update_that_fails_is_not_counted(keeps_home: bool) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=keeps_home)

    def fail() -> None:
        raise RuntimeError("no update")

    with pytest.raises(RuntimeError, match="no update"):
        banks.update(fail)
    assert banks.updates == 0
    banks.select(0)
    assert values(parameters) == [1.0, 10.0]


@pytest.mark.parametrize("needs", ["select", "rest", "update", "forget"])
def test_weights_that_are_on_their_way_are_awaited_when_they_are_needed(needs: str) -> None:
    parameters = two_parameters()
    banks = WeightBanks(parameters, keeps_home=True)
    home = [it.data for it in parameters]
    arrived: list[int] = []

    def arrive() -> None:
        arrived.append(banks.updates)
        for it in home:
            it.add_(5.0)

    banks.update(adding(parameters, 1.0), arrive=arrive)
    banks.select(0)
    assert values(parameters) == [1.0, 10.0] and not arrived
    if needs == "select":
        banks.select(1)
    elif needs == "rest":
        banks.rest()
    elif needs == "forget":
        banks.forget_older()
    else:
        banks.update(adding(parameters, 2.0))
    assert arrived == [1]
    banks.select(1)
    assert values(parameters) == [7.0, 16.0] and arrived == [1]
    if needs == "update":
        banks.select(2)
        assert values(parameters) == [9.0, 18.0]
