"""The list of a plan's features is whole, and whoever walks it names none of them."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_zb import plan
from megatron_zb.plan.features.catalog import FEATURES, asking
from megatron_zb.plan.features.feature import PlanFeature
from megatron_zb.plan.features.vocabulary import PlanVocabulary

FOLDER = Path(plan.__file__).parent
SHARED = {"feature", "catalog"}
WALKERS = "search settings stages prediction table reasons page from_profile given_run request"


def kinds(of: type[PlanFeature]) -> Iterator[type[PlanFeature]]:
    """Yield the classes below one that have none below themselves."""
    for kind in of.__subclasses__():
        yield from kinds(kind) if kind.__subclasses__() else [kind]


def test_every_feature_of_the_package_is_in_the_list() -> None:
    for path in (FOLDER / "features").glob("*.py"):
        importlib.import_module(f"megatron_zb.plan.features.{path.stem}")
    assert {type(it) for it in FEATURES} == {*kinds(PlanFeature)}
    assert len(FEATURES) == 5


@pytest.mark.parametrize("name", WALKERS.split())
def test_whoever_walks_the_list_imports_no_feature(name: str) -> None:
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    parts = [
        n.module.split(".") for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module
    ]
    found = {part[-1] for part in parts if part[:3] == ["megatron_zb", "plan", "features"]}
    assert found <= SHARED


def test_what_is_asked_of_a_feature_takes_the_place_of_the_usual() -> None:
    asked = asking(PlanVocabulary("off"))
    assert [type(it) for it in asked] == [type(it) for it in FEATURES]
    assert {(a, b) for a, b in zip(asked, FEATURES, strict=True) if a != b} == {
        (PlanVocabulary("off"), PlanVocabulary("auto"))
    }
