"""Who may write to a results folder: one run at a time, and from one working directory.

Snakemake remembers what made a file in `.snakemake` of its working directory, by the path as it was given.
From elsewhere, under another path, or without that folder it would take files of other settings for finished. So a
results folder names its home and its own path, paths to it are spelled one way (`near`), and a file in `.snakemake`
says that this is the one that knows it. The kernel drops the lock of a run that dies.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from llmppo.errors import LlmppoError
from llmppo.files import digest, read_json, write_sealed

HELD = "LLMPPO_HOLDS"  # the lock that a parent process holds for this one
HOME = ".home.json"
KNOWN = Path(".snakemake", "llmppo")  # of the working directory: a file for each results folder that it knows
ADOPT = (
    "changed settings would go unnoticed. Go on with them as they are by `llmppo adopt`, with the config that made them, "
    "or choose another results folder"
)


def near(path: str) -> str:
    """One spelling of a path: relative below the working directory, else absolute."""
    absolute = os.path.abspath(os.path.expanduser(path))
    relative = os.path.relpath(absolute)
    return absolute if relative.startswith("..") else relative


def check_home(results: str) -> None:
    """Raise LlmppoError when Snakemake can't know here what made the results.

    They were made from another working directory, under another path, or its `.snakemake` is gone.
    """
    file = Path(results) / HOME
    if not file.is_file():
        return
    home = read_json(file)
    if home["directory"] != os.getcwd():
        raise LlmppoError(
            f"{results} was made from {home['directory']}: go on there, or choose another results folder. From here, changed settings "
            "would go unnoticed. (Moved or copied results: `llmppo adopt`, with the config that made them)"
        )
    if "results" not in home:  # of an earlier version
        return
    if home["results"] != near(results):
        raise LlmppoError(f"{results} is a copy of {home['results']}, or was moved from there: {ADOPT}")
    if not _mark(results).is_file():
        raise LlmppoError(
            f"{results} was made with a .snakemake folder that is gone from {os.getcwd()}: {ADOPT}"
        )


def settle(results: str) -> None:
    """Make the working directory the home of a results folder, and this moment the latest time of its files."""
    _mark(results).parent.mkdir(parents=True, exist_ok=True)
    _mark(results).touch()
    write_sealed(Path(results) / HOME, {"directory": os.getcwd(), "results": near(results)})
    leave_future(Path(results))


def _mark(results: str) -> Path:
    return KNOWN / digest(near(results))


def leave_future(results: Path) -> None:
    """Give files from the future this moment's time.

    Where the clock went backwards, Snakemake would throw away all that is made of them: it is older than they.
    """
    now = time.time()
    for path in results.rglob("*"):
        if path.is_file() and path.stat().st_mtime > now:
            os.utime(path, (now, now))


def _open(path: Path) -> IO[str]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+", encoding="utf-8")
    except OSError as error:
        raise LlmppoError(
            f"{path.parent} can't be written ({error.strerror}); choose another folder with --results"
        ) from None


def _lock(handle: IO[str]) -> bool:
    for last_try in (False, True):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if last_try:
                return False
            time.sleep(0.05)  # somebody may only have looked (`in_use`)
    handle.truncate(0)
    handle.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
    handle.flush()
    return True


@contextmanager
def hold(path: Path) -> Iterator[int | None]:
    """Hold the kernel's lock on a results folder: its descriptor, or None where another run has it."""
    with _open(path) as lock:
        yield lock.fileno() if _lock(lock) else None


def hold_for_good(path: str, results: str) -> IO[str] | None:
    """Hold the lock as long as this process lives; None where a parent holds it. Raises LlmppoError."""
    if os.environ.get(HELD) == path:
        return None
    lock = _open(Path(path))
    if not _lock(lock):
        raise LlmppoError(refusal(results, path))
    settle(results)
    return lock


def in_use(results: str, path: str) -> str | None:
    """`refusal` where another run holds the lock of a results folder now, else None."""
    if os.environ.get(HELD) == path:
        return None
    with suppress(OSError), open(path, encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return refusal(results, path)
    return None


def refusal(results: str, path: str) -> str:
    """Why a results folder can't be used, and the way out."""
    return f"{results} is in use by {holder(Path(path))}; wait for it, stop it, or choose another folder (llmppo run --results DIR, snakemake --config results=DIR)"


def holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(owner["since"]))
        return f"process {owner['pid']} on {owner['host']}, since {since}"
    except (ValueError, KeyError, TypeError):
        return "a run that is just starting"
