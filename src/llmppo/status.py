"""`llmppo status`: what of an experiment is done, at work, left and broken, and why a job would run again."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from llmppo.errors import LlmppoError
from llmppo.ownership import check_home, hold, holder
from llmppo.plan import Plan
from llmppo.progress import Progress
from llmppo.run import snakemake_command
from llmppo.snakelog import START, SnakemakeLog

if TYPE_CHECKING:
    from rich.console import Console

REASON = re.compile(r"    reason: (.*)")
WILDCARDS = re.compile(r"    wildcards: (.*)")
BLOCK = re.compile(r"iterations_(\d+)_")
# Snakemake's reasons, which name files, in our words.
REASONS = {
    "Missing output files": "nothing made yet with these settings and this code, or it was deleted",
    "Params have changed since last execution": "its settings or the code behind it changed",
    "Code has changed since last execution": "its rule changed",
    "Updated input files": "a file that it reads is newer",
    "Input files updated by another job": "a job before it runs again",
    "Set of input files has changed since last execution": "it reads other files than before",
    "Software environment definition has changed since last execution": "the locked packages changed",
    "Output files have to be generated": "its files are incomplete",
    "Incomplete files": "it was interrupted",
}
NOT_YET = [
    REASONS[kind]
    for kind in ("Missing output files", "Output files have to be generated", "Incomplete files")
]


@dataclass
class Status:
    """What `llmppo status` tells; `due` counts (rule, why) of the jobs that the next run would do."""

    progress: Progress
    due: Counter[tuple[str, str]] = field(default_factory=Counter)
    stale: dict[str, int] = field(
        default_factory=dict
    )  # chain to the first of its iterations that is run again
    running: str | None = None  # who holds the results
    failed: list[str] = field(default_factory=list)


def experiment_status(values: dict[str, Any], plan: Plan, snakefile: Path) -> Status:
    """Look at the files, at the last run's log, and at what Snakemake would do.

    Raises LlmppoError, also for results that were made elsewhere.
    """
    check_home(plan.layout.results)
    logs = sorted((Path(plan.layout.root) / "logs").glob("snakemake-*.log"))
    log = SnakemakeLog(logs[-1]) if logs else SnakemakeLog(Path(plan.layout.root) / "absent.log")
    status = Status(Progress(plan, log))
    log.poll()
    lock = Path(plan.layout.lock)
    if lock.is_file():
        with hold(lock) as free:
            status.running = None if free is not None else holder(lock)
    if status.running is None:
        log.running.clear()  # of a run that was killed
    status.failed = [f"{job}, log: {job.log}" for job in log.failed]
    if status.running is None:
        jobs = list(jobs_due(dry_run(values, snakefile)))
        status.due = Counter((job.rule, job.why) for job in jobs)
        for chain in status.progress.chains:
            again = [
                job.iteration
                for job in jobs
                if job.chain == chain.name and job.iteration is not None and job.why not in NOT_YET
            ]
            if again and min(again) <= chain.done:
                status.stale[chain.name] = min(again)
    return status


def dry_run(values: dict[str, Any], snakefile: Path) -> str:
    """Snakemake's words on what it would run, and why. Raises LlmppoError."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file, sort_keys=False)
        file.flush()
        ran = subprocess.run(
            [
                *snakemake_command(snakefile), "--nolock", "--dry-run",
                "--workflow-profile", "none", "--rerun-incomplete", "--configfile", file.name,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
    if ran.returncode:
        raise LlmppoError(f"snakemake can't plan this experiment:\n{ran.stdout[-3000:]}")
    return ran.stdout


@dataclass(frozen=True)
class Due:
    """A job that would run; `chain` is the name of its chain, and `iteration` the first that it makes of it."""

    rule: str
    why: str
    chain: str | None = None
    iteration: int | None = None


def jobs_due(text: str) -> Iterator[Due]:
    """The jobs in the output of a dry run."""
    rule = reason = ""
    for line in [*text.splitlines(), ""]:
        if match := START.fullmatch(line):
            rule = "" if match[1] == "all" else match[1]
        elif rule and (match := REASON.match(line)):
            reason = why(match[1])
        elif rule and reason and not line.startswith("    "):
            yield Due(rule, reason)
            rule = reason = ""
        elif rule and reason and (match := WILDCARDS.match(line)):
            named = dict(part.split("=", 1) for part in match[1].split(", "))
            chain = (
                f"{named['variant']} seed {named['seed']}" if {"variant", "seed"} <= named.keys() else None
            )
            yield Due(rule, reason, chain, _first_iteration(rule, named.get("iteration")))
            rule = reason = ""


def _first_iteration(rule: str, iteration: str | None) -> int | None:
    """The first iteration whose numbers a job makes; None for a job that makes none."""
    if rule == "critic_warmup":
        return 1
    if match := BLOCK.match(rule):
        return int(match[1])
    return int(iteration) if rule in ("rollout", "update", "replay") and iteration is not None else None


def why(reason: str) -> str:
    """Snakemake's reason in words, without the names of files; the first of several, the strongest."""
    kinds = [part.partition(":")[0].strip() for part in reason.split("; ")]
    known = [kind for kind in REASONS if kind in kinds]
    return REASONS[known[0]] if known else kinds[0]


def show_status(console: "Console", plan: Plan, status: Status) -> None:
    """Print the state as tables."""
    from rich.table import Table

    console.print(plan.summary())
    table = Table("chain", "iterations", "last", box=None, header_style="bold")
    for chain in status.progress.chains:
        last = chain.scores or "not begun"
        if chain.name in status.stale:
            last = f"stale from iteration {status.stale[chain.name]} on, which run again; was {last}"
        table.add_row(chain.name, f"{chain.done} of {len(chain.files)}", last)
    console.print(table)
    if status.running is not None:
        at_work = status.progress.running()
        console.print(f"running: {status.running}" + (f"; at work: {at_work}" if at_work else ""))
        return
    for job in status.failed:
        console.print(f"failed in the last run: {job}", style="red")
    if not status.due:
        console.print("nothing is left to do")
        return
    due = Table("to run", "jobs", "why", box=None, header_style="bold")
    for (rule, reason), count in sorted(status.due.items()):
        due.add_row(rule, str(count), reason)
    console.print(due)
