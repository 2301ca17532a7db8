"""Where a stage finds its worker: a socket named after all that must agree between the two.

That is the Snakemake process, the package's source files, the installed libraries, the interpreter, the
working directory and the environment variables, except those that differ from job to job by nature.
"""

import os
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import llmppo
from llmppo.files import digest
from llmppo.process import PARENT, THREAD_COUNTS

LONGEST_SOCKET_PATH = 107  # bytes, sun_path of unix(7) less its closing zero
OF_A_JOB = frozenset((*THREAD_COUNTS, PARENT, "_", "PWD", "OLDPWD", "SHLVL"))


@dataclass(frozen=True)
class Place:
    """Files of one worker, in a folder that only this user can open."""

    folder: Path
    key: str

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.key}.sock"

    @property
    def token(self) -> Path:
        """Holds what a request must bring, for those who may read it."""
        return token_file(self.socket)

    @property
    def lock(self) -> Path:
        """Held by the client that starts the worker."""
        return self.folder / f"{self.key}.lock"

    @property
    def gave_up(self) -> Path:
        """Exists once the worker could not be started: later stages don't try again."""
        return self.folder / f"{self.key}.failed"


def token_file(sock: Path) -> Path:
    return sock.with_suffix(".token")


def private_folder() -> Path | None:
    """The user's runtime folder, else one of ours in the folder for temporary files; None if it isn't private."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime, "llmppo") if runtime else Path(tempfile.gettempdir(), f"llmppo-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    return folder if private else None


def new_key(file: Path) -> str:
    """A key for a server that is about to start, in a file that only this user can read."""
    import secrets  # for servers; stages, which start often, only read keys

    file.unlink(missing_ok=True)
    key = secrets.token_urlsafe(32)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as target:
        target.write(key)
    return key


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path), status.st_mtime_ns, status.st_size


def process_start(pid: int) -> str:
    """When a process started, in clock ticks since boot: with its id it names a process for good."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]


def key_of(workflow: int, environ: Mapping[str, str]) -> str:
    """Name of the worker of the Snakemake process `workflow` for stages with this environment."""
    sources = sorted(Path(llmppo.__file__).parent.rglob("*.py"))
    libraries = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return digest(
        [
            workflow,
            process_start(workflow),
            sys.executable,
            os.getcwd(),
            [_stamp(path) for path in (*sources, *sorted(libraries))],
            {name: value for name, value in environ.items() if name not in OF_A_JOB},
        ]
    )


def find_place(workflow: int) -> Place | None:
    """The place of this process's worker; None where none can be. Raises OSError."""
    folder = private_folder()
    if folder is None:
        return None
    place = Place(folder, key_of(workflow, os.environ))
    return place if len(os.fsencode(place.socket)) <= LONGEST_SOCKET_PATH else None
