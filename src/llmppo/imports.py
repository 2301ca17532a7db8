"""Resolve the `module:name` strings of a config (environment factory, reward, generator, dialogues).

What they name runs as whoever started the run, so it is taken only from where that person put code on purpose:
installed packages and the working directory, which is the experiment's own folder.
"""

import difflib
import importlib.util
import inspect
import json
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from llmppo.errors import RAISED_BY_USERS, ConfigError

_checks: list[Callable[[], None]] = []


@contextmanager
def checked_imports(check: Callable[[], None]) -> Iterator[None]:
    """Within, `check` is called whenever `load_callable` has just imported a module."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def load_callable(spec: str, key: str) -> Callable[..., Any]:
    """Import `module:name`.

    `key` is the config key that holds `spec`; it opens the message of the ConfigError for a bad value.
    """
    module_name, separator, name = spec.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{key}: {spec!r} is not of the form `module:name`, such as `my_task:MyEnv`")
    if (fault := module_fault(module_name)) is not None:
        raise ConfigError(f"{key}: {fault}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    fresh = module_name not in sys.modules
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}: importing `{module_name}` failed: {error}") from error
        raise ConfigError(f"{key}: {_missing(module_name)}") from None
    except RAISED_BY_USERS as error:
        raise ConfigError(f"{key}: importing `{module_name}` failed: {_told(error)}") from error
    if fresh:
        for check in _checks:
            check()
    target = getattr(module, name, None)
    if target is None:
        near = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("_")], n=1)
        raise ConfigError(
            f"{key}: `{module_name}` has no `{name}`{f'; did you mean `{near[0]}`?' if near else ''}"
        )
    if not callable(target):
        raise ConfigError(f"{key}: `{spec}` is a {type(target).__name__}, not something to call")
    return target


def check_arguments(
    target: Callable[..., Any],
    spec: str,
    key: str,
    kwargs: Mapping[str, Any] = {},
    *,
    given: Iterable[str] = (),
    way_out: str = "",
) -> None:
    """Raise ConfigError where `target`, which `spec` names, can't be called with `kwargs` of the config key `key`.

    `given` names the positional arguments that a stage gives before them. `way_out` ends the message about one that is missing.
    """
    try:
        signature = inspect.signature(target)
    except ValueError:  # written in C, and silent about what it takes
        return
    first = list(given)
    try:
        signature.bind(*first, **kwargs)
    except TypeError as error:
        parameters = signature.parameters.values()
        named = [
            parameter.name
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ][len(first) :]
        catches_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if unknown := [] if catches_all else [name for name in kwargs if name not in named]:
            near = difflib.get_close_matches(unknown[0], named, n=1)
            fault = f"unknown argument {unknown[0]!r}{f', did you mean `{near[0]}`?' if near else ''}"
        else:
            fault = f"{error}{way_out}"
        called = f", called with ({', '.join(first)}) before them" if first else ""
        raise ConfigError(f"{key}: {fault}; {spec} takes {signature}{called}") from None


def module_fault(name: str) -> str | None:
    """Why the module `name` is not to be imported, found without importing it; None where it may be."""
    if not all(part.isidentifier() for part in name.split(".")):
        return f"{name!r} is not the dotted name of a module, such as `my_task`"
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return f"`{top}` belongs to Python itself; name a module of yours or of an installed package"
    places = _places(top)
    if not places:
        return _missing(name)
    if top == "llmppo" or any(_is_within(place, folder) for place in places for folder in _own_folders()):
        return None
    if any(_is_within(place, folder) for place in places for folder in _editable_folders()):
        return None
    return (
        f"`{top}` lies in {places[0].parent}, which is neither an installed package nor the folder that you run from; "
        f"install it, or put it into {os.getcwd()}"
    )


def _missing(name: str) -> str:
    return f"no module `{name}`; put {name.replace('.', '/')}.py into {os.getcwd()}, or install its package"


def _told(error: BaseException) -> str:
    """An error of the user's code in a line, with where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{'' if isinstance(error, SyntaxError) else where}"


def _places(top: str) -> list[Path]:
    """Where Python would import a top-level module from; the working directory comes last."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module that a program made by itself
        spec = None
    if spec is not None:
        found = [spec.origin] if spec.has_location and spec.origin else spec.submodule_search_locations or []
        return [Path(os.path.abspath(place)) for place in found]
    here = Path(os.getcwd())
    return [place for place in (here / f"{top}.py", here / top) if place.exists()]


def _own_folders() -> Iterator[Path]:
    """The working directory, and where this Python's packages are installed."""
    yield Path(os.getcwd())
    yield from map(Path, filter(None, map(sysconfig.get_path, ("purelib", "platlib"))))
    # Those of the system's Python too, where the environment was made with them; Debian's are `dist-packages`.
    yield from (Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))


@cache
def _editable_folders() -> tuple[Path, ...]:
    """The source folders of packages installed with `pip install --editable`, as pip recorded them (PEP 610)."""
    found = []
    for distribution in distributions():
        record = json.loads(distribution.read_text("direct_url.json") or "{}")
        if record.get("dir_info", {}).get("editable"):
            found.append(Path(unquote(urlsplit(record["url"]).path)))
    return tuple(found)


def _is_within(place: Path, folder: Path) -> bool:
    return place.is_relative_to(folder) or place.resolve().is_relative_to(folder.resolve())
