"""Colours: one meaning each, told apart by colour-blind people, with text that can be read."""

from __future__ import annotations

import colorsys
import math
from itertools import combinations, pairwise

import pytest

from megatron_zb.drawing.chart import (
    DARK_IDLE_COLOUR,
    IDLE_COLOUR,
    MEMORY_SHADES,
    ONE_SHADE,
    TimeUnit,
    colour_of,
    luminance,
    text_colour_on,
)
from megatron_zb.drawing.html_page import STYLE, _part
from megatron_zb.schedules import PassKind

TRAINING = (PassKind.F, PassKind.B, PassKind.W, PassKind.BW)
DISTILLATION = (PassKind.T, PassKind.S, PassKind.U)
DRAWN = [kind for kind in PassKind.all() if kind.shades is not None and hasattr(PassKind, kind)]
OF_CHUNKS = [kind for kind in DRAWN if kind not in ONE_SHADE]
# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color
# Vision Deficiency", severity 1: what such an eye makes of linear red, green and blue.
EYES = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}
# sRGB to XYZ, and the white of D65.
XYZ = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
WHITE = (0.95047, 1.0, 1.08883)


def channels(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]


def product(matrix: tuple[tuple[float, ...], ...], vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: str, eye: str) -> tuple[float, float, float]:
    """CIE L*a*b* of what an eye sees."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    seen = [min(max(c, 0.0), 1.0) for c in product(EYES[eye], linear)]
    ratios = (value / white for value, white in zip(product(XYZ, seen), WHITE, strict=True))
    x, y, z = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in ratios)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def distance(one: str, other: str, eye: str) -> float:
    """CIE76: 2.3 can just be told apart side by side."""
    return math.dist(lab(one, eye), lab(other, eye))


def shades(kind: PassKind, chunks: int) -> list[str]:
    return [colour_of(kind, chunk, chunks) for chunk in range(chunks)]


def hue(colour: str) -> float:
    """Degrees."""
    return 360 * colorsys.rgb_to_hls(*channels(colour))[0]


def turn(one: float, other: float) -> float:
    """Degrees between two hues."""
    return abs((one - other + 180) % 360 - 180)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("kinds", [TRAINING, DISTILLATION])
@pytest.mark.parametrize(("chunks", "least"), [(1, 17), (2, 20), (4, 14)])
def test_kinds_of_one_picture_are_told_apart(
    eye: str, kinds: tuple[PassKind, ...], chunks: int, least: float
) -> None:
    for one, other in combinations(kinds, 2):
        for a in shades(one, chunks):
            for b in shades(other, chunks):
                assert distance(a, b, eye) >= least, (one, a, other, b)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_passes_of_a_sharded_output_layer_are_told_apart(eye: str, chunks: int) -> None:
    """They have one shade each, among those of a training step."""
    of_training = [colour for kind in TRAINING for colour in shades(kind, chunks)]
    own = {kind: shades(kind, chunks)[0] for kind in ONE_SHADE}
    for kind, colour in own.items():
        assert set(shades(kind, chunks)) == {colour}
        others = [other for name, other in own.items() if name is not kind]
        assert min(distance(colour, other, eye) for other in (*of_training, *others)) >= 11


@pytest.mark.parametrize("eye", EYES)
def test_chunks_are_told_apart_by_lightness(eye: str) -> None:
    for kind in OF_CHUNKS:
        for chunks, least in ((2, 20), (4, 7)):
            light = [lab(colour, eye)[0] for colour in shades(kind, chunks)]
            assert all(b - a >= least for a, b in pairwise(light)), (kind, light)


def test_each_kind_has_one_hue_of_its_own() -> None:
    hues = {kind: hue(colour_of(kind, 0, 2)) for kind in DRAWN}
    for kind in DRAWN:
        for chunks in (1, 2, 3, 4, 8):
            assert all(turn(hue(c), hues[kind]) <= 12 for c in shades(kind, chunks)), kind
    taken = [*hues.values(), hue(MEMORY_SHADES[1])]
    assert min(turn(a, b) for a, b in combinations(taken, 2)) >= 18
    assert max(turn(hue(c), hue(MEMORY_SHADES[1])) for c in MEMORY_SHADES) <= 8


@pytest.mark.parametrize("ground", [IDLE_COLOUR, DARK_IDLE_COLOUR])
@pytest.mark.parametrize("eye", EYES)
def test_grey_is_idle_alone(ground: str, eye: str) -> None:
    red, green, blue = channels(ground)
    assert max(red, green, blue) - min(red, green, blue) < 0.08
    for kind in DRAWN:
        for colour in shades(kind, 2):
            assert max(channels(colour)) - min(channels(colour)) > 0.2
            assert distance(colour, ground, eye) >= 14, (kind, colour)


def test_the_pages_ground_is_the_palettes() -> None:
    light, dark = str(_part(STYLE)).split("prefers-color-scheme: dark", 1)
    assert f"--idle: {IDLE_COLOUR.lower()};" in light
    assert f"--idle: {DARK_IDLE_COLOUR.lower()};" in dark


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_numbers_on_bars_can_be_read(chunks: int) -> None:
    """WCAG 2 asks for a contrast of 4.5."""
    colours = [colour for kind in OF_CHUNKS for colour in shades(kind, chunks)]
    colours += [colour_of(kind, 0, 2) for kind in ONE_SHADE]
    assert len(set(colours)) == len(colours)
    for colour in colours:
        light, dark = sorted((luminance(colour), luminance(text_colour_on(colour))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_time_has_its_unit() -> None:
    assert TimeUnit("time, ms", "ms", 1000.0).of(0.0123456) == "12.3456 ms"
    assert TimeUnit("time, in the unit of the costs").of(26.5) == "26.5"
