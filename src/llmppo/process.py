"""What a stage's process needs from the operating system: threads, its parent's death, its log file."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT = "LLMPPO_PARENT"  # set by the rules to the process id of Snakemake
SERVER_LOG = "LLMPPO_SERVER_LOG"  # file that gets the output of a vLLM server that a stage starts
WORKFLOW = "LLMPPO_WORKFLOW"  # the same process, for the whole life of a stage
THREAD_COUNTS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def thread_environment(threads: int) -> dict[str, str]:
    """Variables that fix the number of threads; they count only if set before numpy or torch is imported.

    A passive wait policy keeps idle OpenMP threads from spinning on cores that other jobs need.
    """
    return {
        **{name: str(threads) for name in THREAD_COUNTS},
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }


def prefer_own_commands() -> None:
    """Put the commands of this Python's environment first in PATH, for child processes."""
    here = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, which must be process `parent`, ends.

    So a killed run leaves nothing behind that would go on writing. Linux only; elsewhere a stage finishes.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the kernel knew our wish
        os.kill(os.getpid(), signal.SIGKILL)


def die_with_workflow() -> int | None:
    """As a job of a rule: die with the Snakemake process that the rule names, and return its id.

    By hand: nothing.
    """
    if is_rank():
        die_with(os.getppid())
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return None
    die_with(int(parent))
    os.environ[WORKFLOW] = parent
    return int(parent)


def is_rank() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def run_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `llmppo ARGUMENTS` as `count` processes that form a group (torchrun); its exit status."""
    here = os.getpid()
    command = [
        sys.executable,
        "-P",
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={count}",
    ]
    return subprocess.run(
        [*command, "-m", "--", "llmppo.cli", *arguments], check=False, preexec_fn=lambda: die_with(here)
    ).returncode


def start_server(
    module: str, arguments: Sequence[str], *, log: Path, variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start `python -m module ARGUMENTS` in a session of its own; its output is appended to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        return subprocess.Popen(
            # -P: the working directory is on the module path of no stage.
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **variables},
            start_new_session=True,
        )


def redirect_output(log: Path) -> TextIO:
    """Send stdout and stderr, also those of libraries and child processes, to `log`.

    Returns a stream to where stderr went before.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    terminal = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="replace")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, errors="replace")
    return terminal
