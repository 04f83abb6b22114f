"""Replacement of functions by hooks that receive the original."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from megatron_zb.megatron_lm.replacing import (
    is_anybodys,
    is_megatrons,
    replace,
    replace_method,
    replace_static,
    when,
)


def doubled(original: Any, *args: Any, **keywords: Any) -> Any:
    return 2 * original(*args, **keywords)


class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def plus(self, number: int = 0) -> int:
        return self.start + number

    @staticmethod
    def three(more: int = 0) -> int:
        return 3 + more


def test_a_function_is_replaced_wherever_megatron_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(more: int = 0) -> int:
        return 1 + more

    names = ("megatron.made", "megatron.holds_it", "others", "megatron_zb.own")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__dict__["one"] = one
        monkeypatch.setitem(sys.modules, name, module)
    undo = replace(modules["megatron.made"], "one", doubled)
    found = {name: module.__dict__["one"](more=2) for name, module in modules.items()}
    assert found == {
        "megatron.made": 6,
        "megatron.holds_it": 6,
        "others": 3,
        "megatron_zb.own": 3,
    }
    undo()
    assert all(module.__dict__["one"] is one for module in modules.values())
    undo = replace(modules["megatron.made"], "one", doubled, is_anybodys)
    assert modules["others"].__dict__["one"](more=1) == 4
    assert modules["megatron_zb.own"].__dict__["one"] is one
    undo()


@pytest.mark.parametrize(
    ("name", "megatrons", "anybodys"),
    [
        ("megatron.core", True, True),
        ("__main__", True, True),
        ("megatron_zb.launch", False, False),
        ("megatron_bridge", False, True),
    ],
)
def test_modules_that_may_hold_a_replacement(name: str, megatrons: bool, anybodys: bool) -> None:
    assert is_megatrons(name) is megatrons
    assert is_anybodys(name) is anybodys


def test_methods_are_replaced_and_given_back() -> None:
    undo = replace_method(Counter, "plus", doubled), replace_static(Counter, "three", doubled)
    assert Counter(4).plus(number=1) == 10
    assert Counter.three(1) == Counter(0).three(more=1) == 8
    for each in undo:
        each()
    assert Counter(4).plus(1) == 5
    assert Counter.three() == Counter(0).three() == 3


def test_a_hook_with_a_subject_calls_the_original_until_there_is_one() -> None:
    subject: list[Counter] = []

    def method(found: Counter, original: Any, number: int, *, twice: bool = False) -> int:
        return found.plus(original(number)) * (2 if twice else 1)

    hook = when(lambda: subject[0] if subject else None, method)
    assert hook(abs, -7) == 7
    subject.append(Counter(10))
    assert hook(abs, -7) == 17
    assert hook(abs, -7, twice=True) == 34
