"""Folders in which the chaos experiment is run and hurt, and what may differ afterwards: nothing.

A `Bench` is a working directory. Whole runs go through `llmppo run`; a single stage is called as its rule
calls it, with this process in the part of Snakemake, so that all stages of a bench share one worker.
"""

import base64
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "workflow"))

from real_results import result_hashes  # noqa: E402

from llmppo.files import write_sealed  # noqa: E402

REPOSITORY = HERE.parents[1]
BIN = Path(sys.executable).parent
CONFIG, TASK = "chaos.yaml", "chaos_task.py"
PATIENCE_S = 600  # what takes longer hangs


@dataclass(frozen=True)
class Stage:
    """A job of the experiment as its rule calls it."""

    rule: str
    command: str
    outputs: tuple[str, ...]
    log: str

    @property
    def name(self) -> str:
        return f"{self.rule} {Path(self.log).stem}"


@dataclass(frozen=True)
class Ended:
    """A process that ended: all it said, on its terminal and in its log."""

    status: int
    text: str


class Bench:
    """A working directory for the chaos experiment."""

    def __init__(self, folder: Path, undisturbed: "Bench | None" = None) -> None:
        self.folder, self.undisturbed = folder, undisturbed
        folder.mkdir(parents=True, exist_ok=True)

    @cached_property
    def truth(self) -> dict[str, str]:
        """Hashes of an undisturbed run."""
        return result_hashes((self.undisturbed or self).results)

    @property
    def results(self) -> Path:
        return self.folder / "results"

    @property
    def terminal(self) -> Path:
        return self.folder / "terminal.txt"

    @property
    def chain(self) -> Path:
        return self.results / "chaos" / "main" / "seed-0"

    # --- states

    def empty(self) -> None:
        """Nothing but config and task."""
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name in (CONFIG, TASK):
            shutil.copy(HERE / name, self.folder)

    def finished(self) -> None:
        """The state after an undisturbed run in this folder."""
        assert self.undisturbed is not None
        self.empty()
        for name in ("results", ".snakemake"):
            shutil.copytree(self.undisturbed.folder / name, self.folder / name, symlinks=True)
        write_sealed(self.results / ".home.json", {"directory": str(self.folder), "results": "results"})

    def without(self, stage: Stage) -> None:
        """A finished run less what one stage wrote."""
        self.finished()
        self.drop(stage)

    def drop(self, stage: Stage) -> None:
        """Delete the outputs of a stage, as Snakemake does before it runs one."""
        for name in stage.outputs:
            (self.folder / name).unlink(missing_ok=True)

    # --- processes

    def environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "LLMPPO_WORKER": str(self.folder / "worker.log"),
            **more,
        }

    def start(self, stage: Stage, **env: str) -> subprocess.Popen[bytes]:
        # `exec`: the shell becomes the stage.
        return subprocess.Popen(
            stage.command, shell=True, cwd=self.folder, env=self.environment(**env),
            stdout=open(self.terminal, "wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end(self, stage: Stage, child: subprocess.Popen[bytes]) -> Ended:
        status = wait(child, PATIENCE_S)
        log = self.folder / stage.log
        logged = log.read_text(errors="replace") if log.exists() else ""
        return Ended(status, self.said() + logged)

    def said(self) -> str:
        """What the last process said on its terminal."""
        return self.terminal.read_text(errors="replace")

    def do(self, stage: Stage, **env: str) -> Ended:
        """Run one stage to its end."""
        return self.end(stage, self.start(stage, **env))

    def start_run(self, *arguments: str, terminal: Path | None = None) -> subprocess.Popen[bytes]:
        """Start `llmppo run`; what it says goes to `terminal`, else to a file in the folder."""
        env = self.environment()
        del env["LLMPPO_WORKER"]
        return subprocess.Popen(
            [str(BIN / "llmppo"), "run", "--config", CONFIG, "--cores", "1", *arguments],
            cwd=self.folder, env=env, stdout=open(terminal or self.terminal, "wb"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def end_run(self, child: subprocess.Popen[bytes], terminal: Path | None = None) -> Ended:
        status = wait(child, PATIENCE_S)
        return Ended(status, (terminal or self.terminal).read_text(errors="replace"))

    def run(self, *arguments: str) -> Ended:
        return self.end_run(self.start_run(*arguments))

    def processes(self) -> list[psutil.Process]:
        """Processes at work in this folder, the oldest first."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return sorted(found, key=lambda process: process.create_time())

    def worker(self) -> psutil.Process | None:
        """The worker of this folder; those that it forks carry its command line too."""
        return next((p for p in self.processes() if is_worker(p)), None)

    # --- what there is

    def found(self) -> dict[str, str]:
        """Hashes of the results, without the optimizer state of policy 1: it is back when that policy is made again."""
        hashes = result_hashes(self.results)
        return {
            name: value
            for name, value in hashes.items()
            if not name.endswith("policy/0001/optimizer.safetensors")
        }

    def differences(self) -> list[str]:
        """Results that are missing, too many, or other than an undisturbed run's."""
        found = self.found()
        return [
            f"{name} differs"
            for name in sorted(found.keys() | self.truth.keys())
            if found.get(name) != self.truth.get(name)
        ]

    def altered(self) -> list[str]:
        """Results that are there under their final name, but wrong."""
        found = result_hashes(self.results)
        return [
            f"{name} is there, but wrong"
            for name in found
            if name in self.truth and found[name] != self.truth[name]
        ]

    def done(self, stages: Sequence[Stage]) -> dict[str, tuple[int, int]]:
        """Stamps of the files of stages that Snakemake has noted as finished."""
        notes = self.folder / ".snakemake"
        found = {}
        for stage in stages:
            records = [base64.urlsafe_b64encode(name.encode()).decode() for name in stage.outputs]
            if all(
                (notes / "metadata" / record).exists() and not (notes / "incomplete" / record).exists()
                for record in records
            ):
                found |= self.stamps(stage.outputs)
        return found

    def stamps(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Time of change and inode of those files that exist."""
        found = {}
        for name in names:
            path = self.folder / name
            if path.is_file():
                found[name] = path.stat().st_mtime_ns, path.stat().st_ino
        return found

    def lost(self, before: Mapping[str, tuple[int, int]]) -> list[str]:
        """Files that are gone, or were made again, since `before`."""
        now = self.stamps(before)
        return [
            f"{name} {'was made again' if name in now else 'is gone'}"
            for name, stamp in before.items()
            if now.get(name) != stamp
        ]

    def written_by(self, stage: Stage) -> list[Path]:
        """What a stage wrote, the content of folders included."""
        files = (path for path in self.results.rglob("*") if path.is_file())
        return [path for path in files if belongs(str(path.relative_to(self.folder)), stage)]

    def others(self, stage: Stage) -> dict[str, tuple[int, int]]:
        """Stamps of what other stages wrote."""
        names = {str(path.relative_to(self.folder)) for path in self.results.rglob("*") if path.is_file()}
        return self.stamps(name for name in names if is_result(name) and not belongs(name, stage))


def belongs(name: str, stage: Stage) -> bool:
    """Whether a file is an output of the stage, or lies in a folder that one stands for."""
    standing = ("manifest.json", "report.html")
    folders = [Path(output).parent for output in stage.outputs if Path(output).name in standing]
    return name in stage.outputs or any(folder in Path(name).parents for folder in folders)


def is_result(name: str) -> bool:
    """Not a log, a benchmark, a lock or the tracker's store, which other processes write when they like."""
    path = Path(name)
    return not {"logs", "benchmarks", "mlartifacts"} & set(path.parts) and not path.name.startswith(
        (".", "mlflow.db")
    )


def is_worker(process: psutil.Process) -> bool:
    return "llmppo.worker.server" in process.cmdline()


def wait(child: subprocess.Popen[bytes], patience: float) -> int:
    """Exit status of a process; one that hangs is killed with all its children."""
    try:
        return child.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
            process.kill()
        child.wait()
        raise TimeoutError(f"{child.args} hangs after {patience} s") from None


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """The first truthy value of `condition`, or its last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def stages_of(bench: Bench) -> list[Stage]:
    """Every job of a finished run, in Snakemake's own words."""
    told = subprocess.run(
        [
            sys.executable, "-m", "snakemake", "--snakefile", str(REPOSITORY / "Snakefile"), "--configfile", CONFIG,
            "--workflow-profile", "none", "--nolock", "--detailed-summary",
        ],
        cwd=bench.folder, env=bench.environment(), check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    rows = [line.split("\t") for line in told.splitlines()]
    header = next(number for number, row in enumerate(rows) if row[0] == "output_file")
    outputs: dict[tuple[str, str, str], list[str]] = {}
    for file, _, rule, log, _, command, *_ in rows[header + 1 :]:
        outputs.setdefault((rule, command, log), []).append(file)
    return [Stage(rule, command, tuple(files), log) for (rule, command, log), files in outputs.items()]


@dataclass
class Lane:
    """What one process of the harness works with: a bench for whole runs, one for single stages."""

    runs: Bench
    bench: Bench
    stages: list[Stage]
    seconds: dict[str, float]  # that a stage takes with a warm worker

    @property
    def repeatable(self) -> list[Stage]:
        """Stages that a finished run can repeat: policy 1 was pruned, so what reads or writes it can't."""
        last = ("iterations/0003", "policy/0003")
        return [
            stage
            for stage in self.stages
            if stage.rule not in ("rollout", "update") or any(part in stage.outputs[0] for part in last)
        ]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def measure(self) -> None:
        """Run every stage once on a finished folder, so that the worker is there and times are known."""
        for stage in self.repeatable:
            self.bench.without(stage)
            for _ in range(2 if not self.seconds else 1):  # the first one waits for the worker
                started = time.monotonic()
                ended = self.bench.do(stage)
                assert ended.status == 0, ended.text
                self.seconds[stage.name] = time.monotonic() - started
