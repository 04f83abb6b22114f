"""Packages of the distribution. Everything else is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megatron_zb*"]), "megatron_zb.configs"],
    package_dir={"megatron_zb.configs": "configs"},
)
