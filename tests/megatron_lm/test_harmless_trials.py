"""Every argument that is said to be harmless has a trial, in every series of Megatron-LM.

``tests/real_megatron_lm/test_harmless_arguments.py`` runs them.
"""

from __future__ import annotations

import pytest
from harmless_trials import TRIALS

from megatron_zb.megatron_core.versions import SERIES
from megatron_zb.megatron_lm import argument_table
from megatron_zb.megatron_lm.argument_table import Verdict


@pytest.mark.parametrize("version", [series.text for series in SERIES])
def test_every_harmless_argument_is_tried(version: str) -> None:
    findings = argument_table._findings().items()
    harmless = {word.partition("=")[0] for word, f in findings if f.verdict is Verdict.HARMLESS}
    known = {a.name for a in argument_table.arguments() if version in a.versions}
    tried = {name for trial in TRIALS for name in trial.names(version)}
    assert len(harmless & known) > 300
    assert harmless & known - tried == set()
