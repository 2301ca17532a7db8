"""Follows the plain log of a running Snakemake: which jobs run, how many are done, which failed."""

import re
from dataclasses import dataclass
from pathlib import Path

START = re.compile(r"(?:local)?rule (\w+):")
FAILURE = re.compile(r"Error in rule (\w+):")
FINISH = re.compile(r"Finished jobid: (\d+)")
PROGRESS = re.compile(r"(\d+) of (\d+) steps")
ATTRIBUTE = re.compile(r"    (jobid|log|wildcards): (.*)")


@dataclass
class Job:
    """A job as the log tells it; `log` is its own log file."""

    rule: str
    jobid: str = ""
    wildcards: str = ""
    log: Path | None = None

    def __str__(self) -> str:
        return f"{self.rule} ({self.wildcards})" if self.wildcards else self.rule


class SnakemakeLog:
    """Reads what was added to a log since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.running: dict[str, Job] = {}
        self.failed: list[Job] = []
        self.done = 0
        self.total = 0
        self._position = 0
        self._started: dict[str, Job] = {}
        self._block: Job | None = None

    def poll(self) -> None:
        """Read on. An unfinished last line waits for the next look."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as handle:
            handle.seek(self._position)
            added = handle.read()
        whole = added[: added.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._line(line)

    def _line(self, line: str) -> None:
        if match := START.fullmatch(line):
            self._block = Job(match[1])
        elif match := FAILURE.fullmatch(line):
            self._block = Job(match[1])
            self.failed.append(self._block)
        elif self._block is not None and (match := ATTRIBUTE.match(line)):
            self._attribute(self._block, match[1], match[2])
        elif not line.startswith(" "):
            self._block = None
            if match := FINISH.match(line):
                self.running.pop(match[1], None)
            elif match := PROGRESS.match(line):
                self.done, self.total = int(match[1]), int(match[2])

    def _attribute(self, job: Job, name: str, value: str) -> None:
        if name == "wildcards":
            job.wildcards = value
        elif name == "log":
            job.log = Path(value.removesuffix(" (check log file(s) for error details)"))
        elif job in self.failed:
            job.jobid = value
            self.running.pop(value, None)
            job.wildcards = self._started[value].wildcards if value in self._started else ""
        else:
            job.jobid = value
            self.running[value] = self._started[value] = job
