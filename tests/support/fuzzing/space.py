"""The settings that are combined, and those that no run may have together: settings.yaml."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("settings.yaml")
OURS, UPSTREAM = "ours", "upstream"

Combination = Mapping[str, str]
"""A value for every setting, by their names."""


@dataclass(frozen=True)
class Setting:
    """A setting; ``words`` has what either side types for each of its values."""

    name: str
    words: dict[str, dict[str, str]]

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def default(self) -> str:
        return self.values[0]

    @property
    def is_ours(self) -> bool:
        """Whether its words are ours alone."""
        said = self.words.values()
        return any(s.get(OURS) for s in said) and not any(s.get(UPSTREAM) for s in said)


@dataclass(frozen=True)
class Impossible:
    """Values of settings that cannot occur together, and why."""

    values: dict[str, frozenset[str]]
    why: str

    def holds(self, combination: Combination) -> bool:
        """Whether a combination, which may be partial, has one of these values of each setting."""
        return all(combination.get(name) in values for name, values in self.values.items())


@dataclass(frozen=True)
class Space:
    """All combinations that one series of Megatron-LM can have."""

    series: str
    common: str
    settings: dict[str, Setting]
    impossible: tuple[Impossible, ...]

    def why_not(self, combination: Combination) -> str | None:
        """The reason why a combination, which may be partial, is impossible; None if it is not."""
        return next((each.why for each in self.impossible if each.holds(combination)), None)

    def with_fixed(self, name: str, value: str) -> Space:
        """Return the combinations that have this value of a setting.

        Raises:
            ValueError: there is no such setting or value.
        """
        if value not in self.settings[name].values:
            raise ValueError(f"{name} has no value {value}")
        others = {each: words for each, words in self.settings[name].words.items() if each == value}
        return replace(self, settings={**self.settings, name: Setting(name, others)})

    def unusual(self, combination: Combination) -> dict[str, str]:
        """The values that are not the defaults."""
        return {n: v for n, v in combination.items() if v != self.settings[n].default}


@cache
def space_of(series: str) -> Space:
    """Read the settings for a series of Megatron-LM, such as 0.16."""
    read = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    settings = {
        name: Setting(name, {str(value): _sides(said) for value, said in values.items()})
        for name, values in read["settings"].items()
    }
    impossible = tuple(_impossible(read["impossible"], settings, series))
    return Space(series, read["common"], settings, impossible)


def without_unknown(space: Space, flags: Collection[str]) -> Space:
    """The settings of this package's own trainer: those whose values need these flags alone."""
    settings = {
        name: Setting(name, {v: said for v, said in s.words.items() if _are_known(said, flags)})
        for name, s in space.settings.items()
    }
    common = yaml.safe_load(FILE.read_text(encoding="utf-8"))["common-of-own-trainer"]
    return replace(space, common=common, settings=settings)


def _are_known(said: dict[str, str], flags: Collection[str]) -> bool:
    """Whether all words of a value are flags that are known, and their values."""
    words = " ".join(said.values()).split()
    words = [word.replace("<unit>", "iters") for word in words]
    return all(w in flags for w in words if w[0] in "-<" and w not in ("<layers>", "<iterations>"))


def _sides(said: str | dict[str, str]) -> dict[str, str]:
    return {OURS: said, UPSTREAM: said} if isinstance(said, str) else said


def _impossible(
    rules: Iterable[dict[str, Any]], settings: dict[str, Setting], series: str
) -> Iterator[Impossible]:
    for rule in rules:
        if rule.get("in", series) == series:
            values = {name: _values(settings[name], v) for name, v in rule["when"].items()}
            yield Impossible(values, rule["why"])


def _values(setting: Setting, given: list[Any] | dict[str, list[Any]]) -> frozenset[str]:
    """Values of a rule: those named, or with ``not`` all others."""
    named = frozenset(map(str, given["not"] if isinstance(given, dict) else given))
    if unknown := named - set(setting.values):
        raise ValueError(f"{setting.name} has no value {', '.join(sorted(unknown))}")
    return frozenset(setting.values) - named if isinstance(given, dict) else named
