"""Old names of modules that have moved, most of them into packages beside this one.

``import megatron_zb.training.loop`` returns ``megatron_zb_train.loop`` itself, not a second copy of
it, and ``python -m megatron_zb.pretrain_gpt`` runs ``megatron_zb_train.pretrain_gpt``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import CodeType, ModuleType
from typing import Any

# The first that fits a name counts: modules come before their package.
MOVED = {
    "megatron_zb.distillation.arguments": "megatron_zb_distill.flags",
    "megatron_zb.distillation.losses": "megatron_zb_distill.student_block",
    "megatron_zb.distillation.optimizer": "megatron_zb_distill.student_block",
    "megatron_zb.distillation.shapes": "megatron_zb_distill.student",
    "megatron_zb.distillation.stage_blocks": "megatron_zb_distill.stage",
    "megatron_zb.distillation": "megatron_zb_distill",
    "megatron_zb.training": "megatron_zb_train",
    "megatron_zb.pretrain_gpt": "megatron_zb_train.pretrain_gpt",
    "megatron_zb.distill_gpt": "megatron_zb_distill.distill_gpt",
    "megatron_zb.planner.attention": "megatron_zb_plan.mixers",
    "megatron_zb.planner": "megatron_zb_plan",
    "megatron_zb.cli.plan": "megatron_zb_plan.cli",
    "megatron_zb.cli.plan_request": "megatron_zb_plan.request",
    "megatron_zb.drawing.html_plan": "megatron_zb_plan.page",
    "megatron_zb.cli.pipe_bd_flags": "megatron_zb_distill.cli",
    "megatron_zb.cli.plan_distillation": "megatron_zb_distill.plan",
    "megatron_zb.cli.quickstart": "megatron_zb_train.quickstart",
    "megatron_zb.cli.sleeping_steps": "megatron_zb_train.sleeping_steps",
    "megatron_zb.cli.watched_run": "megatron_zb_train.watched_run",
    "megatron_zb.runtime.synthetic_steps": "megatron_zb_train.synthetic_steps",
    "megatron_zb.megatron_core.initialisation": "megatron_zb.megatron_core.random_streams",
}


def new_name(name: str) -> str | None:
    """Return today's name of a module that has moved, else None."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name.removeprefix(old)
    return None


class _Moved:
    """Finds a module under its old name, and loads the one with the new name.

    It has the methods of a finder and a loader without their base classes in importlib.abc, whose
    import takes longer than that of the rest of the package.
    """

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to Python to create the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = new_name(fullname)
        found = None if new is None else find_spec(new)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        loader: Any = self
        return spec_from_loader(fullname, loader, origin=found.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        new = new_name(module.__name__)
        assert new is not None
        sys.modules[module.__name__] = import_module(new)  # what import returns then

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code for ``python -m``."""
        new = new_name(fullname)
        found = None if new is None else find_spec(new)
        get_code = getattr(found and found.loader, "get_code", None)
        if found is None or get_code is None:
            return None
        code: CodeType | None = get_code(found.name)
        return code


def install() -> None:
    """Let Python find the old names; before its own finder, which would load a second copy."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())
