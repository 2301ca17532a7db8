"""A hash of the code behind a stage's numbers, because Snakemake does not see code behind a command.

`code_token` covers the stage's module, every project module that it imports (found in the source, nothing
is executed), and the user's own `module:function` names in its settings. Modules are compared as syntax
trees without docstrings, so that comments, formatting and documentation change nothing, and the config
models without their fields, whose values are among a job's settings. Installed libraries are not part of
it: they stand in the lock file.

The user's modules have a part of the token to themselves. A stage compares it with what it has just imported
(`require_planned`), because code that was edited after planning would be noted as what the plan saw.
"""

import ast
import hashlib
import re
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from llmppo.errors import ConfigError
from llmppo.files import digest

PACKAGE = "llmppo"
CONFIG = "llmppo.config"
CALLABLE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")
INSTALLED = ("site-packages", "dist-packages")


@cache
def _find(name: str) -> tuple[Path | None, tuple[Path, ...]]:
    """Source file of a module, and the folders of its submodules, without importing it or its parents.

    Looks where Python would: along sys.path, the working directory last.
    """
    parent, _, leaf = name.rpartition(".")
    folders = _find(parent)[1] if parent else tuple(Path(entry or ".") for entry in (*sys.path, "."))
    namespace = []
    for folder in folders:
        package = folder / leaf
        if (package / "__init__.py").is_file():
            return package / "__init__.py", (package,)
        if (folder / f"{leaf}.py").is_file():
            return folder / f"{leaf}.py", ()
        if package.is_dir():
            namespace.append(package)
    return None, tuple(namespace)


def _source(name: str) -> Path | None:
    """The source file of a module that belongs to the project or to the user, else None."""
    root = name.partition(".")[0]
    if root in sys.stdlib_module_names:
        return None
    path = _find(name)[0]
    installed = path is not None and any(part in INSTALLED for part in path.resolve().parts)
    return path if root == PACKAGE or not installed else None


def _without_fields(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if not isinstance(part, ast.AnnAssign)] or [ast.Pass()]
    return tree


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return tree


def _imports(tree: ast.Module, package: str) -> Iterator[str]:
    """Every module name that a source file may import, lazy imports inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called == "import_module" and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


@cache
def _module(name: str) -> tuple[str, frozenset[str]] | None:
    """Hash of a project or user module's code, and the names it imports with their parents. Raises ConfigError where it isn't Python."""
    path = _source(name)
    if path is None:
        return None
    try:
        tree = _without_docstrings(ast.parse(path.read_bytes(), filename=str(path)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid Python: {error}") from None
    if name == CONFIG:
        tree = _without_fields(tree)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    code = hashlib.sha256(ast.dump(tree).encode()).hexdigest()
    return code, frozenset(part for imported in _imports(tree, package) for part in _with_parents(imported))


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def module_hashes(*roots: str, users: bool = False) -> dict[str, str]:
    """Hash of each project or user module reachable by imports from `roots`, parent packages included.

    The package's own `__init__` is left out: it only re-exports names and holds the version number. With `users`
    all of the package is left out.
    """
    hashes: dict[str, str] = {}
    waiting, seen = [name for root in roots for name in _with_parents(root)], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen or name == PACKAGE or (users and name.startswith(f"{PACKAGE}.")):
            continue
        seen.add(name)
        found = _module(name)
        if found is not None:
            hashes[name] = found[0]
            waiting += found[1]
    return hashes


def callables_in(settings: Any) -> set[str]:
    """Modules of the `module:function` strings anywhere in a settings tree."""
    if isinstance(settings, str):
        match = CALLABLE.fullmatch(settings)
        return {match[1]} if match else set()
    if isinstance(settings, dict):
        return set().union(*(callables_in(value) for value in settings.values()))
    if isinstance(settings, list | tuple):
        return set().union(*(callables_in(value) for value in settings))
    return set()


def stage_module(stage: str) -> str:
    """The module that holds a stage's `run`."""
    return f"{PACKAGE}.stages.{stage}"


def code_token(stage: str, settings: Any = None) -> str:
    """Token of a stage with these settings: it changes exactly when code behind the numbers changes.

    Where the user's modules are part of it, a hash of theirs follows after a hyphen.
    """
    named = sorted(callables_in(settings))
    whole, users = digest(module_hashes(stage_module(stage), *named)), module_hashes(*named, users=True)
    return f"{whole}-{digest(users)}" if users else whole


def require_planned(token: str, settings: Any) -> None:
    """Raise ConfigError where the user's modules differ from those that `token` was made of."""
    planned = token.partition("-")[2]
    if not planned:
        return
    _module.cache_clear()
    _find.cache_clear()
    hashes = module_hashes(*sorted(callables_in(settings)), users=True)
    if digest(hashes) == planned:
        return
    times = {path: path.stat().st_mtime for name in hashes if (path := _source(name)) is not None}
    edited = max(times, key=times.__getitem__, default=None)
    last = f", last {edited} at {time.strftime('%H:%M:%S', time.localtime(times[edited]))}" if edited else ""
    raise ConfigError(
        f"your code was edited after this run was planned{last}; nothing was made with it. The same command plans again, "
        "with the code as it is then"
    )
