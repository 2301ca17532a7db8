"""Resolve the `module:name` strings of a config (environment factory, reward, generator, dialogues)."""

import difflib
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from llmppo.errors import ConfigError


def load_callable(spec: str, key: str) -> Callable[..., Any]:
    """Import `module:name`; the working directory is searched too, so that a user's own file is found.

    `key` is the config key that holds `spec`; it opens the message of the ConfigError for a bad value.
    """
    module_name, separator, name = spec.partition(":")
    if not separator or not module_name or not name:
        raise ConfigError(f"{key}: {spec!r} is not of the form `module:name`, such as `my_task:MyEnv`")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key}: importing `{module_name}` failed: {error}") from error
        raise ConfigError(
            f"{key}: no module `{module_name}`; put {module_name.replace('.', '/')}.py into {here} or on PYTHONPATH"
        ) from None
    except ImportError as error:
        raise ConfigError(f"{key}: importing `{module_name}` failed: {error}") from error
    target = getattr(module, name, None)
    if target is None:
        near = difflib.get_close_matches(name, [n for n in dir(module) if not n.startswith("_")], n=1)
        raise ConfigError(
            f"{key}: `{module_name}` has no `{name}`{f'; did you mean `{near[0]}`?' if near else ''}"
        )
    if not callable(target):
        raise ConfigError(f"{key}: `{spec}` is a {type(target).__name__}, not something to call")
    return target
