"""A stage's side: hand the stage to the workflow's worker, which the first such stage starts.

Standard library only: a stage that finds its worker must cost next to nothing.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from llmppo.errors import less_memory
from llmppo.process import start_server, thread_environment
from llmppo.worker.messages import INTERRUPT, receive, send
from llmppo.worker.place import Place, find_place

WORKER = "LLMPPO_WORKER"  # path of the worker's log, or `off`
OFF = "off"
# The stages that load a model. The others import other libraries, and run once a chain or once in all.
STAGES = frozenset(("base_model", "rollout", "critic_warmup", "update", "iterations", "evaluate", "export"))
# A worker must have one thread: no pool for loading weights, no background thread of Arrow's allocator.
SINGLE_THREADED = {"HF_DEACTIVATE_ASYNC_LOAD": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
START_S = 120.0
INTERRUPT_S = 3.0  # for an interrupted stage to end by itself
ACCEPT_S = 120.0  # a base model may have to be loaded before the fork
# Signals that the kernel or the C library sends to a process for what it did itself.
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def offered(stage: str, settings: str) -> bool:
    """Whether a worker may run the stage with these settings (JSON).

    A forked process can't use a GPU, vLLM in a process wants to set it up from the start, and `torchrun` starts its ranks itself.
    """
    if not settings.startswith("{"):
        return False
    values = json.loads(settings)
    vllm = values.get("vllm") or values.get("rollout", {}).get("vllm") or {}
    return (
        sys.platform.startswith("linux")
        and os.environ.get(WORKER, OFF) not in ("", OFF)
        and stage in STAGES
        and values.get("device", "cpu") == "cpu"
        and vllm.get("mode") != "in_process"
        and values.get("ranks", 1) == 1
    )


def delegate(workflow: int, base: Path | None, arguments: list[str]) -> int | None:
    """Exit status of `llmppo ARGUMENTS` as run by the worker; None where it has to run here.

    `workflow` is the Snakemake process that ends the worker when it ends, `base` the model to have ready.
    """
    log = Path(os.environ[WORKER])
    try:
        place = find_place(workflow)
        if place is None or place.gave_up.exists():
            return None
        connection = connect(place) or start(place, workflow, log)
        if connection is None:
            return None
        with connection:
            return _request(connection, place.token.read_text(encoding="utf-8"), base, arguments)
    except (OSError, EOFError, ValueError):
        return None


def connect(place: Place) -> socket.socket | None:
    """A connection to a worker that listens, else None."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(place.socket))
    except OSError:
        connection.close()
        return None
    return connection


def start(place: Place, workflow: int, log: Path) -> socket.socket | None:
    """Start the worker, or wait for who is starting it, and connect; None where that fails."""
    with open(place.lock, "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = connect(place)
        if found is not None or place.gave_up.exists():
            return found
        place.socket.unlink(missing_ok=True)  # left by a worker that was killed
        worker = start_server(
            "llmppo.worker.server",
            [str(place.socket), str(workflow)],
            log=log,
            variables={**thread_environment(1), **SINGLE_THREADED},
        )
        deadline = time.monotonic() + START_S
        while worker.poll() is None and time.monotonic() < deadline:
            found = connect(place)
            if found is not None:
                return found
            time.sleep(0.02)
        killed = (worker.poll() or 0) < 0  # by somebody else: the next stage may start another one
        worker.kill()
        if not killed:
            place.gave_up.touch()
        return None


def _request(connection: socket.socket, token: str, base: Path | None, arguments: list[str]) -> int | None:
    connection.settimeout(ACCEPT_S)
    send(
        connection,
        {
            "token": token,
            "arguments": arguments,
            "environment": dict(os.environ),
            "umask": _umask(),
            "base": None if base is None else str(base),
        },
        [0, 1, 2],
    )
    accepted, _ = receive(connection)
    if not accepted["forked"]:
        return None
    connection.settimeout(None)
    while True:
        try:
            ended, _ = receive(connection)
        except KeyboardInterrupt:
            with suppress(OSError):
                connection.sendall(INTERRUPT)
            connection.settimeout(INTERRUPT_S)
            continue
        except TimeoutError:
            return 128 + signal.SIGINT  # and the closed connection makes the worker kill the child
        status = os.waitstatus_to_exitcode(ended["status"])
        if status < 0:
            print(
                f"llmppo {arguments[0]}: error: {_end(signal.Signals(-status), arguments[0])}",
                file=sys.stderr,
            )
        return status if status >= 0 else 128 - status


def _end(by: signal.Signals, stage: str) -> str:
    """Why a signal ended a stage's process, in words."""
    if by in CRASHES:
        return f"native code crashed ({by.name}); the log has the Python lines that led there"
    words = f"its process was killed by {by.name}"
    return f"{words}. If nobody did, memory ran out. {less_memory(stage)}" if by == signal.SIGKILL else words


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
