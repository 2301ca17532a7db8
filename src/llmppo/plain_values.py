"""YAML as plain values: what JSON can hold, of a bounded size. Nothing is constructed but text, numbers and lists.

Settings travel as JSON in command lines, which bounds them. YAML's anchors let a short file stand for a huge one,
or for one without an end.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from llmppo.errors import ConfigError
from llmppo.secrecy import secrets

LARGEST = 60_000  # characters of JSON; Linux takes 131,072 bytes an argument
DEEPEST = 40
INTEGERS = range(-(2**63), 2**63)


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML readers silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, Any] = {}
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in first:
                raise yaml.constructor.ConstructorError(
                    None, None, f"`{key.value}` stands here twice", first[key.value]
                )
            first[key.value] = key.start_mark
        return super().construct_mapping(node, deep)


def read_yaml(text: str, source: str) -> Any:
    """The content of a YAML text. Raises ConfigError, which `source` opens."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source} is not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source} is not valid YAML: it is nested too deep") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # a scalar that is not of its type
        raise ConfigError(
            f"{source} is not valid YAML: a value is not what its form or tag says ({error})"
        ) from None


def read_yaml_file(path: str | Path) -> Any:
    """The content of a YAML file. Raises ConfigError naming the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; the shipped experiments are config/config.yaml and config/experiments/*.yaml"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    return read_yaml(text, str(path))


def require_plain(values: Any, source: str) -> None:
    """Raise ConfigError naming the first key whose value can't be JSON, or makes the whole too large."""
    room, hidden = LARGEST, secrets()
    for path, value in _leaves(values, ()):
        key = _cut(".".join(map(str, path)))
        fault = f"it is nested deeper than {DEEPEST}" if len(path) > DEEPEST else _fault(value)
        if fault is not None:
            raise ConfigError(f"{source}:\n  {key or '(top level)'}: {fault}")
        told = [name for name, secret in hidden.items() if secret in value] if isinstance(value, str) else []
        if told:
            raise ConfigError(
                f"{source}:\n  {key}: holds the value of the environment variable {told[0]}, which would stand in logs and results; "
                "let the code that needs it read the variable"
            )
        # Lists and mappings count too, so that no walk is endless.
        room -= len(json.dumps(value)) + 2 if isinstance(value, str | int | float) else 4
        if room < 0:
            raise ConfigError(
                f"{source}:\n  {key}: with this the config is longer than {LARGEST:,} characters; put long texts and "
                "lists into a file that your environment reads (and look for an anchor, `&` and `*`, that repeats much)"
            )


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value with its path, parents first; keys of mappings count as values of their own."""
    yield path, value
    if len(path) > DEEPEST:
        return
    if isinstance(value, Mapping):
        for key, held in value.items():
            yield (*path, _shown(key)), key
            yield from _leaves(held, (*path, _shown(key)))
    elif isinstance(value, list | tuple):
        for number, held in enumerate(value):
            yield from _leaves(held, (*path, number))


def _shown(key: Any) -> str:
    """A key as messages show it: short, and of characters that can be printed."""
    text = (
        str(key) if isinstance(key, str | int | float) and _fault(key) is None else repr(type(key).__name__)
    )
    return _cut(text)


def _cut(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:80]}…"


def _fault(value: Any) -> str | None:
    """Why a value is none of JSON; None where it is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no number that a config can hold"
    if isinstance(value, int) and value not in INTEGERS:
        return "a whole number of more than 64 bits"
    if isinstance(value, str):
        if "\0" in value:
            return "a text with a zero character"
        try:
            value.encode()
        except UnicodeEncodeError:
            return "a text with half a surrogate pair, which is no character"
    if value is None or isinstance(value, str | int | float | list | tuple | Mapping):
        return None
    return f"a {type(value).__name__}; put it in quotes to have it as text"
