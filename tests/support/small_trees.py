"""Small trees that look like a Megatron-LM checkout to what only reads it."""

from __future__ import annotations

from pathlib import Path

PRETRAIN = "from megatron.training import get_args, pretrain\n\npretrain(get_args())\n"


def checkout_tree(root: Path, version: str) -> Path:
    """A folder with the files by which a checkout and its version are known."""
    major, minor, patch = version.split(".")
    write(
        root / "megatron/core/package_info.py",
        f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n",
    )
    write(root / "megatron/training/training.py", "")
    write(root / "megatron/training/__init__.py", "import torch\n")
    write(root / "pretrain_gpt.py", PRETRAIN)
    return root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
