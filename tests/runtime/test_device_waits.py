"""Every place of the package that may make the host wait for a device, by name, with its reason."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("megatron_zb/runtime", "megatron_zb/megatron_core", "megatron_zb/distill")
"""Where tensors of a GPU are handled."""
WAITS = {
    "all_gather_object",
    "barrier",
    "cpu",
    "elapsed_time",
    "empty_cache",
    "is_completed",
    "item",
    "nonzero",
    "numpy",
    "query",
    "synchronize",
    "tolist",
    "wait",
}
"""Methods that read back, poll or wait; of tensors, of work, of events or of threads."""

BETWEEN_STEPS = "between steps, or before the first, when no receive is open"
HOST = "tensors, stores and threads of the host alone"
STREAM = "a wait of the stream, not of the host"
ORDERED = "for what comes earlier in the order of the program"
PLACES = {
    "runtime/channels.py:Channels._connect": BETWEEN_STEPS,
    "runtime/channels.py:Channels._hold_back": ORDERED,
    "runtime/channels.py:Channels.between_passes": "polls sends; waits for none",
    "runtime/channels.py:Channels.take": STREAM,
    "runtime/channels.py:Channels._wait_until_taken": STREAM,
    "runtime/link_times.py:copy_times.seconds": BETWEEN_STEPS,
    "runtime/channels.py:new_groups": BETWEEN_STEPS,
    "runtime/watchdog.py:Inquiry.ask": HOST,
    "runtime/activation_memory.py:_end": STREAM + "; on a CPU for a thread of the host",
    "runtime/link_times.py:_fastest_round": "of a message that has been received",
    "runtime/link_times.py:_finished": "the current stream; the message's peer waits for nothing",
    "runtime/post_validation.py:StateExchange.finish": HOST,
    "runtime/post_validation.py:StateExchange.full": HOST,
    "runtime/progress.py:RankProgress._drop_passed": "polls on a separate thread",
    "runtime/progress.py:_Looker._run": HOST,
    "runtime/progress.py:_Looker.ask": HOST,
    "runtime/observer.py:Recorder.__init__": BETWEEN_STEPS,
    "runtime/observer.py:Recorder._seconds": BETWEEN_STEPS,
    "runtime/observer.py:Recorder.seconds": BETWEEN_STEPS,
    "runtime/observer.py:Recorder.spans": BETWEEN_STEPS,
    "runtime/link_times.py:_seconds_to_sum": BETWEEN_STEPS,
    "runtime/channels.py:ShapedChannels.post_receive": ORDERED + "; a tensor of the host",
    "runtime/watchdog.py:Watchdog._goes_on": HOST,
    "megatron_core/copies.py:CopiesPart._gather_records": "behind all passes of a step",
    "megatron_core/encoder_ahead.py:EncoderAheadPart._gathered": "behind all passes of a step",
    "megatron_core/encoder_ahead.py:_all_done": "behind all passes of a step",
    "megatron_core/copies.py:CopiesPart._of_all": BETWEEN_STEPS + ", or behind all passes of one",
    "megatron_core/checkpoints.py:sums_of": BETWEEN_STEPS,
    "megatron_core/late_updates.py:LateUpdates.update": ORDERED + "; every rank has begun its sum",
    "megatron_core/late_updates.py:LateUpdates._clip": "behind that sum",
    "megatron_core/late_updates.py:LateUpdates.finish_reductions": ORDERED + ", where ranks meet",
    "megatron_core/started_gathers.py:StartedGathers.wait": ORDERED + ", behind the update",
    "megatron_core/started_reductions.py:StartedReductions.wait": ORDERED + ", where ranks meet",
    "megatron_core/experts.py:share": BETWEEN_STEPS,
    "megatron_core/connections.py:WatchPart.forget_marks": BETWEEN_STEPS,
    "megatron_core/forward_state.py:_StateBefore.changed": "for its stream, in the first forwards",
    "megatron_core/forward_state.py:_refuse_users_state": BETWEEN_STEPS,
    "megatron_core/planned_steps.py:_gathered": BETWEEN_STEPS,
    "megatron_core/post_validation.py:PostValidation._close": HOST,
    "megatron_core/post_validation.py:PostValidation._judge": HOST,
    "megatron_core/post_validation.py:PostValidation.was_right": HOST,
    "megatron_core/post_validation.py:_StatisticsGroups.__init__": BETWEEN_STEPS,
    "megatron_core/post_validation.py:_in_single_precision": HOST,
    "megatron_core/random_streams.py:_digest": HOST,
    "megatron_core/verification.py:UnsplitLayers._shares": BETWEEN_STEPS,
    "megatron_core/verification.py:Verification._compare": BETWEEN_STEPS,
    "megatron_core/profiling.py:Profiling.measured": BETWEEN_STEPS,
    "megatron_core/sliced_documents.py:Documents.attend": HOST,
    "megatron_core/sliced_documents.py:all_reduced_max": "before the passes of a step",
    "megatron_core/split_backward.py:SequenceShard.whole": STREAM,
    "distill/block_library.py:_scores": BETWEEN_STEPS,
    "distill/block_library.py:_store": BETWEEN_STEPS,
    "distill/block_library.py:_times": BETWEEN_STEPS,
    "distill/block_library.py:distil_library": BETWEEN_STEPS,
    "distill/block_times.py:_seconds": BETWEEN_STEPS,
    "distill/block_times.py:measure": BETWEEN_STEPS,
    "distill/evaluation.py:compare": BETWEEN_STEPS,
    "distill/last_steps.py:LastSteps.draw": BETWEEN_STEPS,
    "distill/replanning.py:Replanner.find": BETWEEN_STEPS,
    "distill/stitching.py:_all_shapes": BETWEEN_STEPS,
}


def waits(node: ast.AST, names: tuple[str, ...] = ()) -> Iterator[str]:
    """The functions below a node that call one of these methods."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        names = (*names, node.name)
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in WAITS
    ):
        yield ".".join(names)
    for child in ast.iter_child_nodes(node):
        yield from waits(child, names)


def test_every_place_that_may_wait_for_a_device_is_known() -> None:
    found = {
        f"{file.relative_to((ROOT / folder).parent)}:{name}"
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*.py")
        for name in waits(ast.parse(file.read_text(encoding="utf-8")))
    }
    assert found == set(PLACES)


def test_a_place_is_found_wherever_it_stands() -> None:
    code = "class A:\n def f(self, x):\n  return [y.item() for y in x]\ndef g():\n z.synchronize()"
    assert list(waits(ast.parse(code))) == ["A.f", "g"]
