"""One episode under way: what it waits for, what it has seen, and what becomes of it when its environment fails.

A failed episode starts over on a fresh harness, as long as it has retries: the environment is reset with the same
seed and gets the recorded replies again. So an environment that failed once leaves no trace in the episode, and
one that doesn't repeat itself from its seed counts as failed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from llmppo.engines.base import Generation, GenerationRequest
from llmppo.engines.kept import KeptCache
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.protocol import Reset, environment_name
from llmppo.errors import EnvironmentFault, EnvironmentTimeout
from llmppo.trajectories.episode import Episode, EpisodeSpec


@dataclass(frozen=True)
class EnvironmentCall:
    """A call that an episode waits for; `name` says which in errors."""

    name: str
    call: Callable[[], Any]


class EpisodeRun:
    """The episode of `spec`. It waits for its environment, or for the reply to `request`, until it has an `episode`."""

    def __init__(
        self,
        spec: EpisodeSpec,
        harness: RolloutHarness,
        make_harness: Callable[[], RolloutHarness],
        *,
        row_index: int | None,
        evaluation: bool,
        retries: int,
    ) -> None:
        self.spec, self.harness, self._make_harness = spec, harness, make_harness
        self._row_index, self._evaluation, self._retries = row_index, evaluation, retries
        self._kept: KeptCache | None = None
        self._replies: list[tuple[GenerationRequest, Generation]] = []
        self._replayed = 0
        self.request: GenerationRequest | None = None
        self.episode: Episode | None = None
        self.fault: EnvironmentFault | None = None
        self.retired: list[RolloutHarness] = []  # harnesses to close: done with, and not hanging

    def start(self) -> EnvironmentCall:
        """Reset the environment; `receive` takes what comes of it."""
        self._replayed = 0
        reset = self.harness.opening(self.spec, row_index=self._row_index, evaluation=self._evaluation)
        return self._call("reset", reset)

    def reply(self, generation: Generation) -> EnvironmentCall:
        """Let the environment judge the reply to `request`."""
        assert self.request is not None, "no reply was asked for"
        self._replies.append((self.request, generation))
        self.request = None
        return self._next_reply()

    def receive(self, outcome: Any) -> EnvironmentCall | None:
        """Take a call's outcome; returns the next call, None where a reply is needed or the episode is over."""
        try:
            if isinstance(outcome, EnvironmentFault):
                raise outcome
            if isinstance(outcome, Reset):
                self.harness.enter(outcome)
            else:
                self.harness.observe(outcome)
            request = self.harness.request()
            if self._replayed < len(self._replies):
                return self._replay(request)
            if request is None:
                self._end(self.harness.episode())
            else:
                self.request = self._with_cache(request)
        except EnvironmentFault as fault:
            return self._start_over(fault)
        return None

    def _with_cache(self, request: GenerationRequest) -> GenerationRequest:
        """The request, with what an engine kept of the turns before if this isn't the only turn."""
        if self._kept is None and not self.harness.on_last_turn:
            self._kept = KeptCache()
        if self._kept is not None:
            self._kept.read_only = self.harness.on_last_turn
        return replace(request, kept=self._kept)

    def _replay(self, request: GenerationRequest | None) -> EnvironmentCall:
        recorded, _ = self._replies[self._replayed]
        if request is None or list(request.token_ids) != list(recorded.token_ids):
            raise EnvironmentFault(
                f"{self._name}: a retry gave another text after {self._replayed} replies; all randomness must come from "
                "the seed of reset. Set env.retries: 0 for an environment that can't repeat itself"
            )
        return self._next_reply()

    def _next_reply(self) -> EnvironmentCall:
        _, generation = self._replies[self._replayed]
        self._replayed += 1
        return self._call("step", self.harness.answering(generation))

    def _start_over(self, fault: EnvironmentFault) -> EnvironmentCall | None:
        hangs = isinstance(fault, EnvironmentTimeout)
        if self._retries:
            self._retries -= 1
            try:
                fresh = self._make_harness()
            except EnvironmentFault as error:
                fault = error
            else:
                if not hangs:
                    self.retired.append(self.harness)
                self.harness = fresh
                return self.start()
        self.fault = fault
        self._end(self.harness.episode(failure=str(fault)), hangs=hangs)
        return None

    def _end(self, episode: Episode, hangs: bool = False) -> None:
        self.episode = episode
        if self._kept is not None:
            self._kept.clear()
        if not hangs:
            self.retired.append(self.harness)

    @property
    def _name(self) -> str:
        return f"{environment_name(self.harness.env)}, episode {self.spec.episode_id}"

    def _call(self, method: str, call: Callable[[], Any]) -> EnvironmentCall:
        return EnvironmentCall(f"{self._name}: {method}", call)
