"""Policy folders: checking them, and following the ones that an early stop left as pointers.

A stopped chain writes `policy/<i>/manifest.json` of kind "stopped" with the name of its last real
policy; `resolve_policy` gives the folder that holds the weights.
"""

from pathlib import Path

from llmppo.errors import ArtefactError
from llmppo.files import check_manifest

STOPPED = "stopped"


def _prunable(name: str) -> bool:
    """Optimizer state is deleted once the next iteration exists; the manifest keeps its line."""
    return Path(name).name.startswith("optimizer")


def stopped_target(path: Path) -> Path | None:
    """The policy that a stopped one points to, or None when `path` holds weights of its own.

    Files are compared with the manifest. Raises ArtefactError.
    """
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
