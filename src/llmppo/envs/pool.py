"""Environment calls on threads of their own, each under a time limit.

    pool.submit(key, "GuessNumber, episode 3: step", call)
    for key, outcome in pool.wait():    # the calls that ended since; at least one

An outcome is what the call returned, or the EnvironmentFault that it raised or earned by being late; any
other exception is raised by `wait`. Python can't stop a thread: a late call is given up, its thread left
behind and replaced. All threads are daemons, so that one which hangs doesn't keep the process alive. A call
that holds the interpreter lock all the time (a pathological regular expression) can't be seen to be late.

With one call at a time and no limit there are no threads: calls run in the caller's, which environments
with signal handlers or thread-bound connections need.
"""

import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self

from llmppo.errors import EnvironmentFault, EnvironmentTimeout


@dataclass(eq=False)
class _Task:
    key: Hashable
    name: str
    call: Callable[[], Any]
    began: float | None = None
    given_up: bool = False
    outcome: Any = None

    def run(self) -> None:
        try:
            self.outcome = self.call()
        except BaseException as error:  # a thread has no caller to raise in; `wait` does it
            self.outcome = error


class EnvironmentPool:
    """At most `concurrency` calls at once, each at most `timeout_s` seconds long (None: as long as it takes)."""

    def __init__(self, concurrency: int, timeout_s: float | None) -> None:
        self._concurrency, self._timeout_s = concurrency, timeout_s
        self._inline = concurrency == 1 and timeout_s is None
        self._waiting: SimpleQueue[_Task | None] = SimpleQueue()
        self._ended: SimpleQueue[tuple[_Task, float]] = SimpleQueue()
        self._open: dict[_Task, None] = {}  # submitted and not yet reported, in order
        self._workers = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(self._workers):
            self._waiting.put(None)

    @property
    def busy(self) -> bool:
        """Whether calls are under way or waiting for a thread."""
        return bool(self._open)

    def submit(self, key: Hashable, name: str, call: Callable[[], Any]) -> None:
        """Make `call` as soon as a thread is free; `name` says in errors what it is."""
        task = _Task(key, name, call)
        self._open[task] = None
        if self._inline:
            task.run()
            self._ended.put((task, 0.0))
            return
        self._waiting.put(task)
        self._staff()

    def wait(self) -> list[tuple[Hashable, Any]]:
        """Key and outcome of the calls that ended or ran late; blocks until there is one."""
        reports: list[tuple[Hashable, Any]] = []
        while self._open and not reports:
            try:
                ended = [self._ended.get(timeout=self._patience())]
            except Empty:
                ended = []
            while not self._ended.empty():
                ended.append(self._ended.get())
            for task, seconds in ended:
                if task in self._open:  # else it was given up
                    late = self._timeout_s is not None and seconds > self._timeout_s
                    reports.append(self._report(task, late))
            now = time.monotonic()
            for task in [task for task in self._open if self._is_late(task, now)]:
                task.given_up = True
                self._workers -= 1
                reports.append(self._report(task, late=True))
            self._staff()
        return reports

    def _report(self, task: _Task, late: bool) -> tuple[Hashable, Any]:
        del self._open[task]
        if late:
            return task.key, EnvironmentTimeout(
                f"{task.name} took longer than env.step_timeout_s, {self._timeout_s:g} s"
            )
        if isinstance(task.outcome, BaseException) and not isinstance(task.outcome, EnvironmentFault):
            raise task.outcome
        return task.key, task.outcome

    def _patience(self) -> float | None:
        """Seconds until the next call under way may be late; a call that waits for its thread counts as new."""
        if self._timeout_s is None:
            return None
        now = time.monotonic()
        began = min(now if task.began is None else task.began for task in self._open)
        return max(0.0, began + self._timeout_s - now) + 0.001

    def _is_late(self, task: _Task, now: float) -> bool:
        return self._timeout_s is not None and task.began is not None and now - task.began > self._timeout_s

    def _staff(self) -> None:
        while self._workers < min(self._concurrency, len(self._open)):
            self._workers += 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()

    def _work(self) -> None:
        while (task := self._waiting.get()) is not None:
            task.began = time.monotonic()
            task.run()
            self._ended.put((task, time.monotonic() - task.began))
            if task.given_up:
                return
