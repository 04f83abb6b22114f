"""For every argument of a parser, two command lines that differ in it alone; and what ranks say."""

from __future__ import annotations

import argparse
import contextlib
import io
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torch.distributed import HashStore

from megatron_zb.job.agreement import Disagreement, agree

_WORDS = ("7", "0.25", "other", "attn", "some=2", "true", "[1,2]", '{"a": 1}', '{"b": 2}', "")


@dataclass(frozen=True)
class Pair:
    """The arguments of two ranks; ``name`` is the attribute that differs."""

    name: str
    one: argparse.Namespace
    other: argparse.Namespace

    @property
    def values(self) -> tuple[Any, Any]:
        return getattr(self.one, self.name), getattr(self.other, self.name)


def pairs(parser: argparse.ArgumentParser, base: list[str], seed: int) -> Iterator[Pair]:
    """A pair for each attribute of the parser, in a drawn order, with drawn values.

    Args:
        base: what the parser requires.

    An argument with one choice has no other value.
    """
    draw = random.Random(seed)
    actions = {
        a.dest: a
        for a in parser._actions
        if a.option_strings and a.dest != "help" and len(list(a.choices or "ab")) > 1
    }
    for name in draw.sample(sorted(actions), len(actions)):
        yield Pair(name, *_different(parser, base, actions[name], draw))


def _without_rivals(
    parser: argparse.ArgumentParser, base: list[str], action: argparse.Action
) -> list[str]:
    """Leave out what excludes an argument, with its one value."""
    groups = [g._group_actions for g in parser._mutually_exclusive_groups]
    rivals = [a for group in groups if action in group for a in group if a is not action]
    flags = {flag for rival in rivals for flag in rival.option_strings}
    at = {i for i, word in enumerate(base) if word in flags}
    return [word for i, word in enumerate(base) if i not in at and i - 1 not in at]


def _different(
    parser: argparse.ArgumentParser, base: list[str], action: argparse.Action, draw: random.Random
) -> list[argparse.Namespace]:
    default = _parsed(parser, base)
    assert default is not None
    found: list[argparse.Namespace] = []
    rest = _without_rivals(parser, base, action)
    for words in ([flag, *w] for w in _words(action, draw) for flag in action.option_strings):
        args = _parsed(parser, [*rest, *words])
        if args is not None and _is_new(action.dest, args, found):
            found.append(args)
        if len(found) == 2:
            return found
    if _is_new(action.dest, default, found):  # there is no third
        return [default, *found][:2]
    if action.nargs == 0 and found:  # a flag that stores its default
        value = getattr(found[0], action.dest)
        return [*found, argparse.Namespace(**{**vars(found[0]), action.dest: not value})]
    raise AssertionError(f"no two values were found for {action.dest}")


def _is_new(name: str, args: argparse.Namespace, found: list[argparse.Namespace]) -> bool:
    return all(getattr(args, name) != getattr(other, name) for other in found)


def _words(action: argparse.Action, draw: random.Random) -> list[list[str]]:
    if action.nargs == 0:
        return [[]]
    drawn = [str(draw.randint(2, 10**6)), f"{draw.uniform(1e-4, 1):.6f}", f"x{draw.randint(1, 99)}"]
    choices = [getattr(c, "name", c) for c in action.choices or ()]
    words = [[str(word)] for word in [*choices, *drawn, *_WORDS]]
    return words if isinstance(action.nargs, str | None) else [w * action.nargs for w in words]


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace | None:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(Exception, SystemExit):
        return parser.parse_args(words)
    return None


def said_by_ranks(
    pair: Pair, values: Callable[[argparse.Namespace], dict[str, Any]]
) -> list[str | None]:
    """What each of the two ranks is told, None where they agree."""
    store = HashStore()

    def rank(number: int) -> str | None:
        try:
            agree(store, number, 2, values((pair.one, pair.other)[number]), seconds=20)
        except Disagreement as error:
            return str(error)
        return None

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


def check(
    pair: Pair, values: Callable[[argparse.Namespace], dict[str, Any]], may_differ: set[str]
) -> None:
    """Both ranks name the argument and both values, or go on if it is one that may differ."""
    said = said_by_ranks(pair, values)
    if pair.name in may_differ:
        assert said == [None, None], said
        return
    assert said[0] is not None, f"{pair.name} {pair.values} is not compared"
    assert said[0] == said[1]
    flag = "--" + pair.name.replace("_", "-")
    first, second = said[0].split(" on rank 0, but ")
    for text, value in ((first, pair.values[0]), (second.split(" on rank 1")[0], pair.values[1])):
        assert flag in text or pair.name in text, said[0]
        if all(v is None or v is False for v in pair.values):  # "no" would be said of both
            assert str(value) in text, said[0]
        elif value is None or value is False:
            assert " no " in f" {text}", said[0]
        elif not isinstance(value, bool):
            assert _shown(value) in text, said[0]


def _shown(value: Any) -> str:
    """A part of the value that stands in a message as it is."""
    one = value[0] if isinstance(value, list | tuple) and value else value
    return str(getattr(one, "name", None) or getattr(one, "__name__", None) or one)
