"""Exception types, one a kind of fault; each message names the file, key or episode and the way out."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmppo.secrecy import redact

# What code of a user may raise without ending the run: `sys.exit` too, which libraries call.
RAISED_BY_USERS = (Exception, SystemExit)


class LlmppoError(Exception):
    """Base of every error a user can cause; the command line prints it without a traceback."""


class ConfigError(LlmppoError):
    """A key, value or combination in an experiment config that can't be used."""


class ArtefactError(LlmppoError):
    """A file in a results folder is missing, damaged or of another kind than expected."""


class TrajectoryError(LlmppoError):
    """An episode breaks an invariant of the trajectory format."""


class EnvironmentFault(LlmppoError):
    """An environment raised, or returned something outside its protocol.

    Its words may have a secret in them, and get into results.
    """

    def __init__(self, message: str) -> None:
        super().__init__(redact(message))


class EnvironmentTimeout(EnvironmentFault):
    """An environment took longer than `env.step_timeout_s`; it may still be running."""


class NonFiniteError(LlmppoError):
    """A loss or gradient is NaN or infinite; names the episodes, raised before any weight changes."""


class MemoryShortError(LlmppoError):
    """A learn step needs more memory than there is; names the settings that lower it."""


class EngineError(LlmppoError):
    """A generation engine can't be started, can't be reached, or refused a request."""


class TemplateError(LlmppoError):
    """A chat template can't frame a turn without changing the tokens before it."""


MEMORY_KNOBS = {
    "rollout": "rollout.hf_generate_chunk_size, then rollout.shard_size",
    "evaluate": "rollout.hf_generate_chunk_size, then evaluation.episodes",
    "update": "ppo.micro_batch_size_per_gpu, then ppo.gradient_checkpointing: true",
}


def memory_fault(error: BaseException, stage: str) -> str | None:
    """An allocator's refusal in words, the smallest change first; None for any other error."""
    texts = ("can't allocate memory", "out of memory", "bad_alloc", "can't start new thread")
    no_memory = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not no_memory and not any(text in str(error) for text in texts):
        return None
    return f"memory ran out. {less_memory(stage)}"


def less_memory(stage: str) -> str:
    """What lets a stage need less memory, the smallest change first."""
    knobs = MEMORY_KNOBS.get(stage, MEMORY_KNOBS["update"])
    return f"What helps, the smallest change first: fewer jobs at once (--cores), {knobs}; see docs/memory.md"


NO_ROOM = "make room there"
NOT_OURS = "make it writable, or choose another folder with --results"
# What no code can help, and what a user can do about it.
MACHINE_FAULTS = {
    errno.ENOSPC: NO_ROOM,
    errno.EDQUOT: NO_ROOM,
    errno.EROFS: NOT_OURS,
    errno.EACCES: NOT_OURS,
    errno.EPERM: NOT_OURS,
    errno.EIO: "its disk fails",
}


SQLITE_FULL = "database or disk is full"


def _fault_number(error: BaseException) -> int | None:
    """The system's number of what went wrong, which libraries may have put into words of their own."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if match := re.search(r"(?:\bos error |\[Errno )(\d+)", str(error)):
        return int(match[1])
    return errno.ENOSPC if SQLITE_FULL in str(error) else None


def no_room(error: BaseException) -> bool:
    """Whether a disk is full, from whatever library met it."""
    return MACHINE_FAULTS.get(_fault_number(error) or 0) == NO_ROOM


def machine_fault(error: BaseException, place: object = None) -> str | None:
    """A full or read-only disk in words, from whatever library met it; None for any other error.

    `place` is what was being written, for errors that name no file.
    """
    number = _fault_number(error)
    if number not in MACHINE_FAULTS:
        return None
    file = (error.filename if isinstance(error, OSError) else None) or place
    where = "" if file is None else f"{file}: "
    return f"{where}{os.strerror(number)}; {MACHINE_FAULTS[number]}. What is finished stays, and the same command goes on"


@contextmanager
def reading(
    path: str | Path,
    kind: type[LlmppoError] = ArtefactError,
    way_out: str = "delete it and run the same command",
) -> Iterator[None]:
    """What goes wrong within is a fault of the file or folder `path`, whatever a library makes of its content.

    The machine's own faults pass as they are.
    """
    try:
        yield
    except LlmppoError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except Exception as error:
        if machine_fault(error) or memory_fault(error, ""):
            raise
        raise kind(f"{path} can't be read: {type(error).__name__}: {error}; {way_out}") from error
