"""How far an experiment is, read from its metrics files, as lines in a log or bars on a terminal."""

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmppo.errors import ArtefactError
from llmppo.files import read_json
from llmppo.layout import ChainLayout
from llmppo.plan import Plan
from llmppo.snakelog import Job, SnakemakeLog

HEARTBEAT_S = 60.0
WARM_START = "warm start "  # how the lines of `models.warm_start` begin
RECENT = 30  # finished iterations that the time left is estimated from


def duration(seconds: float) -> str:
    """`under 1 min`, `about 3 min`, `about 2 h 05 min`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "under 1 min"
    return "about " + (f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min")


def _metrics(path: Path) -> dict[str, Any]:
    """A metrics file that may vanish while Snakemake redoes it. Raises ArtefactError for a damaged one."""
    try:
        return read_json(path)
    except ArtefactError:
        if path.exists():
            raise
        return {}


def warm_start_progress(job: Job) -> str | None:
    """The last line of a `base_model` job's log about its warm start: step, loss, time left."""
    if job.rule != "base_model" or job.log is None or not job.log.is_file():
        return None
    lines = job.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(WARM_START)), None)


def _paths(chain: ChainLayout, iterations: int) -> list[Path]:
    """The metrics files of a chain's iterations, from the first on."""
    return [Path(chain.metrics(iteration)) for iteration in range(1, iterations + 1)]


@dataclass
class ChainProgress:
    """One variant and seed: iterations done, and the last one's scores."""

    variant: str
    seed: int
    files: list[Path]  # metrics of iterations 1..n
    unfinished: list[Path]  # where a job of several iterations writes them first
    before: dict[int, float] = field(default_factory=dict)  # index to mtime of what an earlier run left
    done: int = 0
    stopped: bool = False
    scores: str = ""

    def __post_init__(self) -> None:
        times = ((index, self._written(index)) for index in range(len(self.files)))
        self.before = {index: written for index, written in times if written is not None}
        self.done = self._kept()
        if self.done:
            self._read(self.done)

    @property
    def name(self) -> str:
        return f"{self.variant} seed {self.seed}"

    @property
    def left(self) -> int:
        return 0 if self.stopped else len(self.files) - self.done

    def _written(self, index: int) -> float | None:
        """When the metrics of an iteration were written; None where there are none."""
        for path in (self.files[index], self.unfinished[index]):
            with suppress(FileNotFoundError):
                return path.stat().st_mtime
        return None

    def _kept(self) -> int:
        """Iterations from the first on whose metrics an earlier run left and that still stand."""
        return next((index for index in range(len(self.files)) if index not in self.before), len(self.files))

    def _read(self, iteration: int) -> None:
        index = iteration - 1
        try:
            content = _metrics(self.files[index]) or _metrics(self.unfinished[index])
        except ArtefactError:
            self.scores = "metrics are damaged or edited: `llmppo verify` tells the way out"
            return
        metrics = content.get("metrics", {})
        if "stopped_at" in content:
            self.stopped, self.scores = (
                True,
                f"stopped at policy {content['stopped_at']}, the goal is reached",
            )
            return
        names = (("reward", "rollout/reward_mean"), ("success", "rollout/success_rate"))
        scores = [f"{label} {metrics[name]:.2f}" for label, name in names if metrics.get(name) is not None]
        failed = int(metrics.get("rollout/failed_episodes") or 0)
        self.scores = ", ".join([*scores, *([f"{failed} episodes failed"] if failed else [])])

    def advance(self) -> Iterator[str]:
        """A line for each iteration that finished since the last look; old files count until redone."""
        for index in list(self.before):
            if self._written(index) is None:
                del self.before[index]
                self.done = min(self.done, self._kept())
        while self.done < len(self.files):
            written = self._written(self.done)
            if written is None or written == self.before.get(self.done):
                return
            self.before[self.done] = written
            self.done += 1
            was_stopped = self.stopped
            self._read(self.done)
            if not was_stopped:
                yield ", ".join(
                    filter(None, [f"{self.name}: iteration {self.done}/{len(self.files)}", self.scores])
                )


class Progress:
    """The state of a run: its chains, its jobs, and the time left."""

    def __init__(self, plan: Plan, log: SnakemakeLog) -> None:
        self.log = log
        self.chains = [
            ChainProgress(variant, seed, _paths(done, plan.last), _paths(done.unfinished, plan.last))
            for variant, seed in plan.chains
            for done in [plan.layout.of_chain(variant, seed)]
        ]
        self._finished: deque[float] = deque(maxlen=RECENT)

    def poll(self) -> list[str]:
        """Look at the files; returns a line for each iteration that finished."""
        self.log.poll()
        news = [line for chain in self.chains for line in chain.advance()]
        self._finished.extend(time.monotonic() for _ in news)
        return news

    def left(self) -> str:
        """`, about 3 min left` as soon as two iterations tell how long one takes."""
        remaining = sum(chain.left for chain in self.chains)
        if not remaining or len(self._finished) < 2:
            return ""
        pace = (self._finished[-1] - self._finished[0]) / (len(self._finished) - 1)
        waited = time.monotonic() - self._finished[-1]
        return f", {duration(max(remaining * pace - waited, 0))} left"

    def running(self) -> str:
        """`rollout (2), update`: the stages at work, and how far warm starts are, which no metrics file tells."""
        rules = sorted(job.rule for job in self.log.running.values())
        counts = {rule: rules.count(rule) for rule in rules}
        words = [f"{rule} ({count})" if count > 1 else rule for rule, count in counts.items()]
        return ", ".join([*words, *filter(None, map(warm_start_progress, self.log.running.values()))])


class Lines:
    """One line for each finished iteration; a sign of life each minute in between."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._said = time.monotonic()

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        self.update()

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._said = time.monotonic()

    def update(self) -> None:
        for line in self.progress.poll():
            self._say(line + self.progress.left())
        if time.monotonic() - self._said > HEARTBEAT_S:
            log, running = self.progress.log, self.progress.running()
            self._say(
                f"{log.done} of {log.total or '?'} steps done{f', running: {running}' if running else ''}"
            )


class Bars:
    """A bar for each chain and one for all steps, on a terminal."""

    def __init__(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        self.progress = progress
        self.display = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self.tasks = {
            chain.name: self.display.add_task(
                chain.name, total=len(chain.files), completed=chain.done, note=chain.scores
            )
            for chain in progress.chains
        }
        self.steps = self.display.add_task("all steps", total=None, note="planning")

    def __enter__(self) -> "Bars":
        self.display.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.update()
        self.display.stop()

    def update(self) -> None:
        self.progress.poll()
        for chain in self.progress.chains:
            self.display.update(self.tasks[chain.name], completed=chain.done, note=chain.scores)
        log = self.progress.log
        note = self.progress.running() + self.progress.left()
        self.display.update(self.steps, completed=log.done, total=log.total or None, note=note)


def display(progress: Progress) -> Lines | Bars:
    """Bars where someone watches, lines elsewhere."""
    watched = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    return Bars(progress) if watched else Lines(progress)
