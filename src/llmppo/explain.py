"""Validation errors as messages that name the key, and what would be accepted."""

import difflib
from typing import Any

from pydantic import ValidationError

from llmppo.config import ExperimentConfig, Section
from llmppo.errors import ConfigError
from llmppo.secrecy import redact

MOST = 10  # faults that are told
VARIANTS = (
    "such as `variants: {main: {}, narrow: {ppo: {clip_coef: 0.1}}}`, where {} is the experiment unchanged"
)
NAMES = "has at most 100 letters, digits, `_`, `-` and `.`, and begins with a letter or digit"


def _resolve(location: tuple[Any, ...]) -> tuple[str, list[str]]:
    """The dotted key of a pydantic error location, and the keys accepted in the section that holds it.

    In a section of several kinds pydantic puts the kind into the location; it is no key of the file.
    """
    models: list[Any] = [ExperimentConfig]
    parts = []
    for part in location[:-1]:
        kinds = [model for model in models if _kind(model) == part]
        if kinds:
            models = kinds
            continue
        parts.append(part)
        following: list[Any] = []
        for model in models:
            field = model.model_fields.get(part) if isinstance(part, str) else None
            if field is not None:
                following += _sections_in(field.annotation)
        models = following or models
    known = sorted({name for model in models for name in model.model_fields})
    return ".".join(str(part) for part in (*parts, *location[-1:])), known


def _kind(section: Any) -> Any:
    """The value of `kind` that selects a section, or None."""
    field = section.model_fields.get("kind")
    return field.annotation.__args__[0] if field is not None else None


def _sections_in(annotation: Any) -> list[Any]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for argument in getattr(annotation, "__args__", ()) for section in _sections_in(argument)]


def _shown(value: Any) -> str:
    text = redact(repr(value))
    return text if len(text) <= 100 else f"{text[:100]}…"


def explain(error: ValidationError, source: str) -> ConfigError:
    """One line for each of the first faults: the key, what is wrong, the value, and the nearest accepted key."""
    lines = []
    faults = error.errors(include_url=False)
    for fault in faults[:MOST]:
        location = tuple(fault["loc"])
        key, known = _resolve(location)
        message = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            near = difflib.get_close_matches(str(location[-1]), known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else "."
            message = f"unknown key{hint} Accepted: {', '.join(known)}"
        elif fault["type"] == "missing":
            message = "is required"
        elif location[-1:] == ("[key]",):
            key = ".".join(str(part) for part in location[:-2])
            fault_of = f"can't be a folder; a name {NAMES}, {VARIANTS}" if key == "variants" else "is no text"
            message = f"the name {_shown(location[-2])} {fault_of}"
        elif location[:1] == ("variants",) and fault["type"] in ("dict_type", "too_short"):
            found = "nothing stands there" if fault["input"] is None else f"got {_shown(fault['input'])}"
            wanted = (
                "names with what each overrides"
                if len(location) == 1
                else "sections with the keys that it overrides, or {}"
            )
            message = f"{wanted} ({found}), {VARIANTS}"
        elif fault["type"] == "string_pattern_mismatch":
            message = f"{message}; a name {NAMES} (got {_shown(fault['input'])})"
        elif not isinstance(fault["input"], (dict, Section)):
            message = f"{message} (got {_shown(fault['input'])})"
        lines.append(f"  {key or '(top level)'}: {message}")
    if len(faults) > MOST:
        lines.append(f"  and {len(faults) - MOST} more")
    return ConfigError(f"{source}:\n" + "\n".join(lines))
