"""Rows of a table from the JSON that measurements.py writes; docs/performance.md has them, too.

``v-half+offload/4`` is v-half with offload on four ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MEMORY_TARGETS = {"v-zb": 1.03, "v-half": 0.66, "v-min": 0.54}
SPLIT_TARGET = 1.02


class Row(NamedTuple):
    """One measured thing."""

    part: str
    what: str
    measured: str


def rows(results: dict[str, Any]) -> list[Row]:
    """Return the rows of all measurements, also of those that failed or were not made."""
    machine = results["machine"]
    gpus = machine.get("gpus", 0)
    name = machine.get("gpu") or "CPU: tiny sizes, no figure of a GPU"
    found = [Row("machine", "device", f"{gpus} x {name}" if gpus else name)]
    versions = (
        (key, machine[key])
        for key in ("python", "torch", "cuda", "driver", "nccl")
        if machine.get(key)
    )
    found += [Row("machine", key, str(value)) for key, value in versions]
    for part, answer in results["measurements"].items():
        found += list(_of_part(part, answer))
    return found


def _of_part(part: str, answer: dict[str, Any]) -> Iterator[Row]:
    if isinstance(answer.get("not_measured"), str):
        yield Row(part, "not measured", answer["not_measured"])
    if "failed" in answer:
        yield Row(part, "failed", f"{answer['failed']}: {answer['last_line']}"[:300])
    found = answer.get("found", answer)
    for row in _READERS.get(found.get("benchmark", ""), _nothing)(found):
        yield row._replace(part=part)


def _nothing(_found: dict[str, Any]) -> Iterator[Row]:
    yield from ()


def _queues(found: dict[str, Any]) -> Iterator[Row]:
    held_up = [name for name, answer in found.get("answers", {}).items() if answer.get("held_up")]
    if "answers" in found:
        yield Row("", "blocked while another kernel waits", "; ".join(held_up) or "nothing")


def _receives(found: dict[str, Any]) -> Iterator[Row]:
    for options, by_count in found.get("product_ms", {}).items():
        base = by_count["0"]
        text = ", ".join(f"{n}: {ms / base:.2f}" for n, ms in by_count.items() if base)
        what = f"time of a matrix product beside n receives ({found['receives']}, {options})"
        yield Row("", what, text)
    if "pinned" in found:
        pinned = found["pinned"]
        what = "pinned memory that is allocated, relative to the request"
        yield Row("", what, _ratio(pinned, "taken", "asked"))


def _training(found: dict[str, Any]) -> Iterator[Row]:
    of = _named(found.get("reference", {}).get("schedule") or "Megatron")
    outcomes = []
    for result in found.get("results", []):
        outcome = result.get("failed") or f"losses and weights bit-equal to {of}'s"
        if "failed" not in result and not result["equal_losses"]:
            most = result["largest_loss_difference"]
            within = most <= result.get("tolerance", 0.0)
            outcome = f"losses within {_power(most)} of {of}'s"
            outcome = outcome if within else f"losses differ by up to {most:g} from {of}'s"
        elif "failed" not in result and result["differing_weights"]:
            outcome = f"{len(result['differing_weights'])} weights differ"
        outcomes.append((f"{_named(result['schedule'])}/{result['ranks']}", outcome))
    for row in _grouped(outcomes):
        yield row._replace(what=f"{row.what} in {_kind(found['job'])}")


def _named(schedule: str) -> str:
    """Return a schedule of the results in the words of the documentation."""
    name, *others = schedule.split("+")
    words = {"moved": "offload", "dropped": "recomputation"}
    return "+".join((name, *(words.get(other, other) for other in others)))


def _grouped(outcomes: list[tuple[str, str]]) -> Iterator[Row]:
    """Return a row for every outcome, with everything that has it."""
    by_outcome: dict[str, list[str]] = {}
    for what, outcome in outcomes:
        by_outcome.setdefault(outcome, []).append(what)
    for outcome, names in by_outcome.items():
        yield Row("", ", ".join(names), outcome)


def _features(found: dict[str, Any]) -> Iterator[Row]:
    outcomes: dict[str, dict[str, list[str]]] = {}
    for row in found["rows"]:
        outcome = f"not shown: {row['why']}"
        if row["equal"] is not None:
            outcome = "equal losses" if row["equal"] else f"OTHER LOSSES {row['why']}".strip()
            if not row["equal"] and row.get("within", 1.0) <= found.get("tolerance", 0.0):
                outcome = f"losses within {_power(row['within'])}"
        schedules = outcomes.setdefault(outcome, {}).setdefault(row["feature"], [])
        schedules.append(row["schedule"] or "Megatron's own")
    for outcome, features in outcomes.items():
        names = "; ".join(f"{name} ({', '.join(of)})" for name, of in features.items())
        yield Row("", f"pretrain_gpt.py, {found['ranks']} ranks: {names}", outcome)


def _kind(job: dict[str, Any]) -> str:
    """What a training has besides its schedule."""
    words = [job["dtype"] if job.get("fp8") is None else f"fp8 {job['fp8']}"]
    if job.get("implementation") == "transformer-engine":
        words.append("TE")
    words += [name for name in ("experts", "dropout") if job.get(name)]
    words += ["unequal lengths"] * bool(job.get("unequal"))
    words += ["over NCCL"] * bool(job.get("nccl"))
    return " ".join(words)


def _split(found: dict[str, Any]) -> Iterator[Row]:
    by_type: dict[str, list[str]] = {}
    for result in found.get("results", []):
        times = "/".join(f"{1000 * result['seconds'][name]:.2f}" for name in ("F", "B", "W", "BW"))
        text = f"{result['implementation']} {result['ratio']:.3f} ({times})"
        by_type.setdefault(result["dtype"], []).append(text)
    for dtype, texts in by_type.items():
        what = f"time of F+B+W relative to F+BW in {dtype}, target {SPLIT_TARGET} (ms of F/B/W/BW)"
        yield Row("", what, ", ".join(texts))


def _memory(found: dict[str, Any]) -> Iterator[Row]:
    peaks = []
    timed = found["job"].get("timed")
    for name, result in found.get("results", {}).items():
        target = f" (target {MEMORY_TARGETS[name]})" if name in MEMORY_TARGETS else ""
        target = "" if timed else target
        peaks.append(f"{name} {result['peak_bytes_ratio']:.3f}{target}")
    if peaks:
        whole = ", whole model" if found["job"]["sizes"]["vocabulary"] else ""
        long = f", {found['job']['sizes']['seq_length']} tokens" if timed else ""
        layers = f"{found['job']['implementation']}{whole}{long}"
        what = f"allocated peak of the worst rank, relative to 1F1B's, {layers}"
        yield Row("", what, ", ".join(peaks))
    if timed:
        times = [f"{name} {each['seconds_ratio']:.3f}" for name, each in found["results"].items()]
        what = f"step of the slowest rank, relative to 1F1B's{long}"
        yield Row("", what, ", ".join(times))


def _steps(found: dict[str, Any]) -> Iterator[Row]:
    for name, result in found.get("results", {}).items():
        if "step_seconds" not in result:
            reason = result.get("not_measured") or f"failed: {result['failed']}"
            yield Row("", name, "out of memory" if result.get("out_of_memory") else reason)
            continue
        peak = result.get("peak_bytes")
        text = f"{1000 * result['step_seconds']:.1f} ms"
        if "of_megatron" in result:
            text += f", {result['of_megatron']:.3f} of Megatron's 1F1B"
        if peak:
            text += f", {peak / 2**30:.2f} GiB at most"
        if "bubble" in result:
            text += f", bubble {result['bubble']:.1%}"
        if "of_megatron" in result.get("plan", {}):
            text += f"; planned {result['plan']['of_megatron']:.3f} of Megatron's 1F1B"
        chunks = f" ×{result['chunks']}" if "chunks" in result else ""
        yield Row("", f"{name}{chunks}: a step on {found['ranks']} ranks", text)


_HEADS = ("tokens/s", "of 1F1B's step", "peak GiB", "bubble")


def to_paste(results: dict[str, Any]) -> list[str]:
    """Return the schedules beside the plan as a table in Markdown, with a line about the model."""
    answer = results["measurements"].get("step_times", {})
    found = answer.get("found", answer)
    if not found.get("results"):
        return []
    sizes, gpu = found["sizes"], results["machine"].get("gpu")
    where = f"{found['ranks']} x {gpu}" if gpu else f"{found['ranks']} CPU ranks"
    lines = [
        f"{where}: {found['layers']} layers of hidden size {sizes['hidden']}, "
        f"{found['microbatches']} microbatches of {sizes['seq_length']} tokens, "
        f"{found['implementation']} layers; the plan is for {found['planned_for']}.",
        *([] if gpu else ["A CPU's times and bubbles say nothing; its bytes are those saved."]),
        "",
        "| " + " | ".join(["schedule", *_HEADS, *(f"plan: {head}" for head in _HEADS)]) + " |",
        "|---|" + "---:|" * (2 * len(_HEADS)),
    ]
    for name, result in found["results"].items():
        chunks = f" ×{result['chunks']}" if "chunks" in result else ""
        cells = [*_figures(result), *_figures(result.get("plan", {}))]
        lines.append(f"| {name}{chunks} | {' | '.join(cells)} |")
    return lines


def _figures(result: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a run or a plan: in place of the first, why there are none."""
    if "step_seconds" not in result:
        memory = "out of memory" if result.get("out_of_memory") else None
        why = ("not_measured", "not_predicted", "failed")
        yield memory or next((result[key] for key in why if key in result), "not measured")
        yield from [""] * (len(_HEADS) - 1)
        return
    yield f"{result['tokens_per_second']:.0f}"
    yield f"{result['of_megatron']:.3f}" if "of_megatron" in result else ""
    peak = result.get("peak_bytes")
    yield f"{peak / 2**30:.3g}" if peak else ""
    yield f"{result['bubble']:.1%}"


def _quantized(found: dict[str, Any]) -> Iterator[Row]:
    recipes: dict[str, list[dict[str, Any]]] = {}
    for result in found.get("results", []):
        recipes.setdefault(result["recipe"], []).append(result)
    outcomes = []
    for recipe, results in recipes.items():
        wrong = [r["kind"] for r in results if r.get("unequal") or "failed" in r]
        outcome = f"others in {', '.join(wrong)}" if wrong else "bit-equal to a whole backward's"
        outcomes.append((recipe, results[0].get("not_measured") or outcome))
    for row in _grouped(outcomes):
        yield row._replace(what=f"weight gradients of W, {row.what} scaling")


def _graphs(found: dict[str, Any]) -> Iterator[Row]:
    equal = all(all(steps) for steps in found["equal"])
    what = f"{found['schedule']}/{found['ranks']} in {found['precision']}"
    word = "bit-equal" if equal else "not equal"
    yield Row("", what, f"steps replayed from CUDA graphs {word} to steps without")


def _random_states(found: dict[str, Any]) -> Iterator[Row]:
    outcomes = [(name, "equal" if same else "other") for name, same in found["equal"].items()]
    for row in _grouped(outcomes):
        yield row._replace(what=f"dropout masks of a recomputed forward, RNG tracker {row.what}")


def _distillation(found: dict[str, Any]) -> Iterator[Row]:
    for name, result in found.get("results", {}).items():
        outcome = result.get("failed")
        if outcome is None and "largest_difference" in result:
            most = result["largest_difference"]
            outcome = f"losses of every block within {_power(most)} of one rank's"
            outcome = outcome if most else "losses of every block bit-equal to one rank's"
        yield Row("", f"distillation in {found['dtype']}, {name}", outcome or "trained")


def _power(difference: float) -> str:
    """Return the power of ten that a difference does not exceed."""
    return f"{10.0 ** math.ceil(math.log10(difference)):.0e}" if difference else "0"


def _ratio(found: dict[str, Any], part: str, whole: str) -> str:
    return f"{found[part] / found[whole]:.2f}"


_READERS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "queues": _queues,
    "waiting_receive": _receives,
    "one_gpu_training": _training,
    "features": _features,
    "split_backward": _split,
    "rank_memory": _memory,
    "step_times": _steps,
    "quantized_gradients": _quantized,
    "graphs": _graphs,
    "random_states": _random_states,
    "distillation": _distillation,
}
