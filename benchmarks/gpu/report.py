"""Rows of a table from the JSON that measurements.py writes; docs/performance.md has them, too."""

from __future__ import annotations

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
        (key, machine[key]) for key in ("python", "torch", "cuda", "driver") if machine.get(key)
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
        yield Row("", "held up while a kernel spins", ", ".join(held_up) or "nothing")


def _receives(found: dict[str, Any]) -> Iterator[Row]:
    for options, by_count in found.get("product_ms", {}).items():
        base = by_count["0"]
        text = ", ".join(f"{n}: {ms / base:.2f}" for n, ms in by_count.items() if base)
        what = f"time of a product beside n receives ({found['receives']}, {options})"
        yield Row("", what, text)
    if "pinned" in found:
        pinned = found["pinned"]
        yield Row("", "pinned memory taken, of what was asked", _ratio(pinned, "taken", "asked"))


def _training(found: dict[str, Any]) -> Iterator[Row]:
    of = found.get("reference", {}).get("schedule") or "Megatron"
    kind = _kind(found["job"])
    for result in found.get("results", []):
        problem = result.get("failed")
        if problem is None and not result["equal_losses"]:
            problem = f"losses differ by up to {result['largest_loss_difference']:g}"
        elif problem is None and result["differing_weights"]:
            problem = f"{len(result['differing_weights'])} weights differ"
        what = f"{result['schedule']}{kind} on {result['ranks']} ranks, losses and weights"
        yield Row("", what, problem or f"bit-equal to {of}'s")


def _kind(job: dict[str, Any]) -> str:
    """What a training has besides its schedule."""
    words = [job["dtype"] if job.get("fp8") is None else f"fp8 {job['fp8']}"]
    if job.get("implementation") == "transformer-engine":
        words.append("Transformer-Engine")
    if job.get("experts"):
        words.append(f"{job['experts']} experts")
    if job.get("dropout"):
        words.append("dropout")
    return f" ({', '.join(words)})"


def _split(found: dict[str, Any]) -> Iterator[Row]:
    for result in found.get("results", []):
        seconds = result["seconds"]
        times = ", ".join(f"{name} {1000 * seconds[name]:.2f}" for name in ("F", "B", "W", "BW"))
        what = f"{result['implementation']}, {result['dtype']}: (F+B+W) / (F+BW)"
        yield Row("", what, f"{result['ratio']:.3f} (target {SPLIT_TARGET}); ms: {times}")


def _memory(found: dict[str, Any]) -> Iterator[Row]:
    for name, result in found.get("results", {}).items():
        target = f" (target {MEMORY_TARGETS[name]})" if name in MEMORY_TARGETS else ""
        what = f"{name}: peak of the worst rank, of 1F1B's"
        yield Row("", what, f"{result['peak_bytes_ratio']:.3f}{target}")


def _steps(found: dict[str, Any]) -> Iterator[Row]:
    for name, result in found.get("results", {}).items():
        if "failed" in result:
            yield Row("", name, f"failed: {result['failed']}")
            continue
        peak = result.get("peak_bytes")
        text = f"{1000 * result['step_seconds']:.1f} ms"
        if "of_megatron" in result:
            text += f", {result['of_megatron']:.3f} of Megatron's 1F1B"
        if peak:
            text += f", {peak / 2**30:.2f} GiB at most"
        yield Row("", f"{name}: a step on {found['ranks']} ranks", text)


def _quantized(found: dict[str, Any]) -> Iterator[Row]:
    recipes: dict[str, list[dict[str, Any]]] = {}
    for result in found.get("results", []):
        recipes.setdefault(result["recipe"], []).append(result)
    for recipe, results in recipes.items():
        what = f"gradients of W in {recipe} scaling"
        if len(results) == 1 and "not_measured" in results[0]:
            yield Row("", what, results[0]["not_measured"])
            continue
        wrong = [r["kind"] for r in results if r.get("unequal") or "failed" in r]
        text = f"other in {', '.join(wrong)}" if wrong else "bit-equal to a whole backward's"
        yield Row("", what, f"{text}, {len(results)} modules")


def _graphs(found: dict[str, Any]) -> Iterator[Row]:
    equal = all(all(steps) for steps in found["equal"])
    what = f"{found['schedule']} in {found['precision']} on {found['ranks']} ranks, graphs replayed"
    yield Row("", what, "bit-equal to steps without" if equal else "other than steps without")


def _random_states(found: dict[str, Any]) -> Iterator[Row]:
    for tracker, equal in found["equal"].items():
        yield Row("", f"masks drawn again, RNG tracker {tracker}", "equal" if equal else "other")


def _ratio(found: dict[str, Any], part: str, whole: str) -> str:
    return f"{found[part] / found[whole]:.2f}"


_READERS: dict[str, Callable[[dict[str, Any]], Iterator[Row]]] = {
    "queues": _queues,
    "waiting_receive": _receives,
    "one_gpu_training": _training,
    "split_backward": _split,
    "rank_memory": _memory,
    "step_times": _steps,
    "quantized_gradients": _quantized,
    "graphs": _graphs,
    "random_states": _random_states,
}
