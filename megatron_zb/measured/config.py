"""YAML files of the planner: types of the fields, and errors for wrong values.

Files are read with ``yaml.safe_load`` and checked field by field; nothing in them is executed.
Every field has an example, so that a mistake can be answered with a right value. Descriptions of
models and devices that come with the package are found by name.
"""

from __future__ import annotations

import difflib
import errno
import re
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from megatron_zb import files
from megatron_zb.errors import UsageError

# --- files that come with the package


_PACKAGE = Path(__file__).resolve().parents[1]

BuiltinKind = Literal["models", "devices", "students"]


def builtin_folder(kind: BuiltinKind) -> Path:
    """Return their folder: in the package once it is installed, beside it in its source."""
    installed = _PACKAGE / "configs" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / "configs" / kind


def path_of(flag: str, kind: BuiltinKind, value: Path) -> Path:
    """Return a path as it is, or the path of the file that a name such as ``gpt_28b`` stands for.

    Raises:
        UsageError: it is a name, and unknown.
    """
    if value.suffix or value.name != str(value) or value.exists():
        return value
    found = builtin_folder(kind) / f"{value}.yaml"
    if not found.is_file():
        known = ", ".join(sorted(path.stem for path in builtin_folder(kind).glob("*.yaml")))
        raise UsageError(f"{flag} '{value}' is unknown: give a file, or one of {known}")
    return found


# --- fields and their values


_LARGEST = 1 << 20  # bytes of a file: a description has a few hundred
_DEEPEST = 50  # brackets within brackets: a description has three


LARGEST_SIZE = 10_000_000


def size(description: str, example: int, default: Any = ...) -> Any:
    """Define a field, a whole number of 1 or more; it is required unless it has a default."""
    return Field(default, gt=0, le=LARGEST_SIZE, description=description, examples=[example])


def optional_size(description: str, example: int) -> Any:
    """Define an optional field, a whole number of 1 or more."""
    return size(description, example, None)


class Section(BaseModel):
    """A part of a file: its fields and no others, each of exactly its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


_Section = TypeVar("_Section", bound=Section)


def read(path: Path, kind: type[_Section]) -> _Section:
    """Read and check a file.

    Raises:
        UsageError: it cannot be read, is no YAML, or a field is missing, unknown or wrong.
    """
    try:
        raw = files.read_bytes(path, _LARGEST)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise UsageError(
                f"{path} is larger than {_LARGEST} bytes: give a file of a few lines"
            ) from error
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    return parse(raw, str(path), kind)


def parse(raw: bytes, name: str, kind: type[_Section]) -> _Section:
    """Parse and check the text of a file; ``name`` is its name in errors.

    Raises:
        UsageError: as :func:`read`.
    """
    if (depth := _depth(raw)) > _DEEPEST:
        raise UsageError(
            f"{name} has brackets within brackets {depth} deep: write lines such as "
            f"{_first_line(kind)}"
        )
    try:
        # Aliases of aliases grow without bound; a description needs none.
        has_alias = any(isinstance(token, yaml.AliasToken) for token in yaml.scan(raw))
        values = None if has_alias else yaml.safe_load(raw)
    except Exception as error:  # what an ill-formed tag raises depends on the tag
        if _is_at_the_end(error, raw):
            raise UsageError(
                f"{name} breaks off{_place(error)}: the rest of the file is missing; copy it again"
            ) from error
        raise UsageError(f"{name} is not YAML{_place(error)}: write {_first_line(kind)}") from error
    if has_alias:
        raise UsageError(f"{name} has an alias (*name): write the value out")
    if not isinstance(values, dict):
        raise UsageError(f"{name} has no fields: write lines such as {_first_line(kind)}")
    if stray := [key for key in values if not isinstance(key, str)]:
        said = _describe(stray[0])
        raise UsageError(f"{name}: {said} is no field's name: write {_first_line(kind)}")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=True, include_context=True)[0]
        line = _line_of(raw, tuple(first["loc"]))
        raise UsageError(f"{name}: {_sentence(first, kind)} (line {line})") from error


def _depth(raw: bytes) -> int:
    """Return the nesting depth of brackets: the time to read them grows with its square."""
    steps = (1 if bracket in b"[{" else -1 for bracket in re.findall(rb"[\[\]{}]", raw))
    return max(accumulate(steps), default=0)


def _line_of(raw: bytes, location: tuple[Any, ...]) -> int:
    """Return the line of a value; of one that is missing, the line in which its section ends."""
    node = yaml.compose(raw, Loader=yaml.SafeLoader)
    for part in location:
        if isinstance(node, yaml.MappingNode):
            inner = next((value for key, value in node.value if key.value == str(part)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            inner = node.value[part] if part < len(node.value) else None
        else:
            inner = None
        if inner is None:
            before = raw.splitlines()[: node.end_mark.line + (node.end_mark.column > 0)]
            return len(before)
        node = inner
    return int(node.start_mark.line) + 1


def _is_at_the_end(error: Exception, raw: bytes) -> bool:
    """Return whether the mistake was found after all of the text: it is cut off there."""
    mark = getattr(error, "problem_mark", None)
    return mark is not None and mark.index >= len(raw.decode(errors="replace").rstrip())


def _place(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f" at line {mark.line + 1}"


def _first_line(kind: type[Section]) -> str:
    name, field = next(iter(kind.model_fields.items()))
    return f"'{name}: {_example(field)}'"


def _sentence(error: Any, kind: type[Section]) -> str:
    location = tuple(error["loc"])
    path = ".".join(str(part)[:80] for part in location)
    field = _field(kind, location)
    if error["type"] == "extra_forbidden":
        return f"'{path}' is no field here: {_nearest(kind, location)}"
    if error["type"] == "missing":
        return f"'{path}' is missing: give, for example, {_line(location, field)}"
    reason = str(error["ctx"]["error"]) if error["type"] == "value_error" else error["msg"]
    reason = reason[0].lower() + reason[1:]
    if error["type"] == "value_error":  # a rule about a whole section or file tells all itself
        return f"{f'{path!r}: ' if path else ''}{reason}"
    return (
        f"'{path}' is {_describe(error['input'])}: {reason}; give, for example, "
        f"{_line(location, field)}"
    )


def _line(location: tuple[Any, ...], field: FieldInfo | None) -> str:
    if isinstance(location[-1], int):  # an item of a list, for which the example is the whole list
        return f"{location[-2]}: {_example(field)}"
    return f"{location[-1]}: {_example(field)}" if field else str(location[-1])


def _nearest(kind: type[Section], location: tuple[Any, ...]) -> str:
    holder = _holder(kind, location) or kind
    known = list(holder.model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
    if near:
        return (
            f"did you mean {near[0]}, such as {near[0]}: {_example(holder.model_fields[near[0]])}"
        )
    return f"the fields are {', '.join(known)}, such as {_first_line(holder)}"


def _holder(kind: type[Section], location: tuple[Any, ...]) -> type[Section] | None:
    """Return the section of the last part of a location; a number is an index of a list."""
    return _resolved(kind, location)[0]


def _field(kind: type[Section], location: tuple[Any, ...]) -> FieldInfo | None:
    return _resolved(kind, location)[1]


def _resolved(
    kind: type[Section], location: tuple[Any, ...]
) -> tuple[type[Section] | None, FieldInfo | None]:
    """Return the section of the last part of a location, and its field.

    A number is an index of a list, and a part behind a field of sections by their names is a name:
    both have this field.
    """
    holder: type[Section] | None = kind
    inner, field, is_name = holder, None, False
    for part in location:
        holder = inner
        if isinstance(part, int) or is_name:
            is_name = False
            continue
        field = holder.model_fields.get(str(part)) if holder else None
        inner = section_of(field) if field else None
        is_name = field is not None and get_origin(field.annotation) is dict
    return holder, field


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a field, also of an optional one or of a list of sections."""
    kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
    return next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)


def _example(field: FieldInfo | None) -> str:
    if field is None:
        return "a value"
    if field.examples:
        value = field.examples[0]
        return str(value).lower() if isinstance(value, bool) else str(value)
    inner = section_of(field)
    if inner is None:
        return "a value"
    needed = [(n, f) for n, f in inner.model_fields.items() if f.is_required()]
    one = "{" + ", ".join(f"{name}: {_example(f)}" for name, f in needed) + "}"
    return f"[{one}]" if get_origin(field.annotation) is list else one


def _describe(value: Any) -> str:
    """Describe a value in an error: short, on one line, without walking into it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a huge number"
    if isinstance(value, float | str):
        return repr(value if isinstance(value, float) else value[:40])
    return f"a {type(value).__name__}"
