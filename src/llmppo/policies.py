"""Policy folders: checking them, and following the ones that an early stop left as pointers.

A stopped chain writes `policy/<i>/manifest.json` of kind "stopped" with the name of its last real
policy; `resolve_policy` gives the folder that holds the weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from llmppo.errors import ArtefactError
from llmppo.files import MANIFEST, check_manifest, read_manifest

STOPPED = "stopped"
Prunable = Literal["optimizer", "weights"]


def _prunable(name: str) -> bool:
    """Optimizer state is deleted once the next iteration exists; the manifest keeps its line."""
    return Path(name).name.startswith("optimizer")


def stopped_target(path: Path) -> Path | None:
    """The policy that a stopped one points to, or None when `path` holds weights of its own.

    Files are compared with the manifest. Raises ArtefactError.
    """
    if _is_pruned(path):
        raise ArtefactError(
            f"{path} was pruned: its weights went once later policies existed. `keep_every` and `evaluation.every` say "
            f"which policies are kept; to make it again, delete {path.parent} from a kept iteration on"
        )
    manifest = check_manifest(path, allow_missing=_prunable)
    if manifest.get("kind") != STOPPED:
        return None
    target = manifest.get("target")
    if not isinstance(target, str) or target in ("", ".", "..") or Path(target).name != target:
        raise ArtefactError(
            f"{path}/manifest.json: `target` must name a policy beside it (got {target!r}); "
            f"delete {path} and run the same command"
        )
    return path.parent / target


def resolve_policy(path: Path) -> Path:
    """The folder with the weights of policy `path`, after checking every file it lists.

    Raises ArtefactError when a file is missing or damaged, or when pointers run in a circle.
    """
    current, seen = Path(path), {Path(path)}
    while (target := stopped_target(current)) is not None:
        if target in seen:
            raise ArtefactError(
                f"{current}/manifest.json points back to {target}; delete {current} and run the same command"
            )
        seen.add(target)
        current = target
    return current


def prune(path: Path, what: Prunable) -> None:
    """Delete a policy's optimizer state, or all its weights; its manifest stays, so that nothing reruns.

    A policy that isn't there, or a pointer to another one, is left as it is.
    """
    if not (path / MANIFEST).is_file():
        return
    for name in read_manifest(path)["files"]:
        if _prunable(name) or (what == "weights" and name.endswith(".safetensors")):
            (path / name).unlink(missing_ok=True)


def may_be_pruned(folder: Path) -> Callable[[str], bool]:
    """Which files of a folder's manifest may be absent: optimizer state, and the weights of a pruned policy."""
    pruned = _is_pruned(folder)
    return lambda name: _prunable(name) or (pruned and name.endswith(".safetensors"))


def is_whole(path: Path, optimizer: bool) -> bool:
    """Whether a policy has all files of its manifest; its optimizer state only where `optimizer` asks for it."""
    try:
        names = read_manifest(path)["files"]
    except ArtefactError:
        return False
    return all((path / name).is_file() for name in names if optimizer or not _prunable(name))


def _is_pruned(path: Path) -> bool:
    """Whether a policy lost its weights to `prune`, all of them at once."""
    if not (path / MANIFEST).is_file():
        return False
    weights = [name for name in read_manifest(path)["files"] if name.endswith(".safetensors")]
    return bool(weights) and not any((path / name).exists() for name in weights)
