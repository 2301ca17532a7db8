"""Files that are either whole or absent: atomic writes, canonical JSON, hashes and manifests.

Everything is written under a temporary name in the same folder, fsynced and renamed, so that a file
(or a folder with a `manifest.json`) that has its final name is complete.
"""

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmppo.errors import ArtefactError

MANIFEST = "manifest.json"
HASHED = 16 * 2**20
SEAL = "sha256"  # key of a JSON file's own checksum
SEAL_LINE = "# sha256 of the lines above: "  # last line of a text file with a checksum of its own


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any, length: int = 12) -> str:
    """Short hex hash of a JSON-able value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


def sha256_file(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(target: Path) -> Path:
    """A hidden name beside `target`, after removing what killed processes left under such names.

    The machine is in the name: whether a process of another node still writes can't be seen from here.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.tmp-{os.uname().nodename}-"
    for stale in target.parent.glob(f"{glob.escape(prefix)}*"):
        owner = stale.name.removeprefix(prefix)
        if owner.isdigit() and int(owner) != os.getpid() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink(missing_ok=True)
    return target.with_name(f"{prefix}{os.getpid()}")


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on a clean exit it is fsynced and takes `path`'s name."""
    target = Path(path)
    temporary = _temporary(target)
    try:
        yield temporary
        _fsync_path(temporary)
        os.replace(temporary, target)
        _fsync_path(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path in a temporary folder, for a writer that keeps files beside its own.

    On a clean exit the file takes `path`'s name, unless another process has given that to one of its own meanwhile.
    """
    target = Path(path)
    folder = _temporary(target)
    folder.mkdir()
    try:
        yield folder / target.name
        _fsync_path(folder / target.name)
        try:
            os.link(folder / target.name, target)
        except FileExistsError:
            return
        except OSError:  # a file system without hard links
            os.rename(folder / target.name, target)
        _fsync_path(target.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write indented JSON with sorted keys. Non-finite numbers are refused (they are not JSON)."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def write_sealed(path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
    """Write JSON with a checksum of its own, for facts that no manifest covers; `read_json` compares and drops it."""
    plain = json.loads(json.dumps(facts, allow_nan=False))
    write_json(path, {**plain, SEAL: digest(plain, 64)})


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file. Raises ArtefactError where it is absent, not JSON, or differs from its checksum."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtefactError(f"{path} does not exist; run the stage that writes it first") from None
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ArtefactError(
            f"{path} is not valid JSON ({error}); delete it and run the same command"
        ) from error
    if isinstance(content, dict) and SEAL in content:
        seal = content.pop(SEAL)
        if digest(content, 64) != seal:
            raise ArtefactError(
                f"{path} differs from its checksum (damaged or edited); delete it and run the same command"
            )
    return content


def write_sealed_text(path: str | os.PathLike[str], text: str) -> None:
    """Write lines of a format that takes `#` for a comment, with their checksum; `read_sealed_text` compares and drops it."""
    write_text(path, f"{text}{SEAL_LINE}{hashlib.sha256(text.encode()).hexdigest()}\n")


def read_sealed_text(path: str | os.PathLike[str]) -> str:
    """The text of a file that `write_sealed_text` wrote. Raises ArtefactError where it differs from its checksum."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except ValueError as error:
        raise ArtefactError(f"{path} is not text ({error}); delete it and run the same command") from None
    text, _, seal = content.rpartition(SEAL_LINE)
    if hashlib.sha256(text.encode()).hexdigest() != seal.strip():
        raise ArtefactError(
            f"{path} differs from its checksum (damaged or edited); delete it and run the same command"
        )
    return text


def write_manifest(folder: Path, **facts: Any) -> dict[str, Any]:
    """Write `manifest.json`: sha256 and size of every file below `folder`, and `facts`. Written last."""
    files = {
        str(path.relative_to(folder)): {"sha256": sha256_file(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    manifest = {**facts, "files": files}
    write_sealed(folder / MANIFEST, manifest)
    return manifest


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """A folder's manifest, its files not looked at. Raises ArtefactError where it isn't one, or names files elsewhere."""
    path = Path(folder) / MANIFEST
    manifest = read_json(path)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise ArtefactError(f"{path} lists no files; delete {folder} and run the same command")
    for name, entry in files.items():
        if (
            Path(name).is_absolute()
            or ".." in Path(name).parts
            or "\0" in name
            or not isinstance(entry, dict)
        ):
            raise ArtefactError(
                f"{path} has a wrong line for {name!r}; delete {folder} and run the same command"
            )
    return manifest


def check_manifest(
    folder: str | os.PathLike[str],
    allow_missing: Callable[[str], bool] = lambda name: False,
    skip: Callable[[str], bool] = lambda name: False,
) -> dict[str, Any]:
    """Return a folder's manifest after comparing every file with it, but for those that `skip` names.

    Raises ArtefactError naming the first file that is absent (unless `allow_missing(name)`) or differs.
    """
    root = Path(folder)
    manifest = read_manifest(root)
    for name, entry in manifest["files"].items():
        path = root / name
        if skip(name):
            continue
        if not path.is_file():
            if allow_missing(name):
                continue
            raise ArtefactError(
                f"{path} is missing although {root / MANIFEST} lists it; delete {root} and run the same command"
            )
        try:
            same = path.stat().st_size == entry.get("bytes") and sha256_file(path) == entry.get("sha256")
        except FileNotFoundError:
            if allow_missing(name):  # pruned while it was being read
                continue
            raise
        if not same:
            raise ArtefactError(
                f"{path} differs from its manifest (damaged or edited); delete {root} and run the same command"
            )
    return manifest


@contextmanager
def atomic_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty temporary folder that takes the name `path` on a clean exit, replacing what was there.

    A folder is valid only with its manifest, which callers write last (`write_manifest`).
    """
    target = Path(path)
    temporary = _temporary(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                _fsync_path(file)
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
        _fsync_path(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fingerprint(paths: Iterable[str]) -> str:
    """Hash of what files hold, whatever their times: a file put back from a backup is older than what was made of another.

    Of one above `HASHED` bytes, whose reading would be felt at each start, size and time count instead.
    """
    contents: list[Any] = []
    for path in map(Path, paths):
        if not path.is_file():
            contents.append(None)  # Snakemake tells
            continue
        facts = path.stat()
        small = facts.st_size <= HASHED
        contents.append(sha256_file(path) if small else [facts.st_size, facts.st_mtime_ns])
    return digest(contents)


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files whose change is a change of `path`: itself, or all that lie in the folder."""
    path = Path(path)
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
