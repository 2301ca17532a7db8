"""Scripted stand-ins for the two partners of a harness: an environment and a generation engine."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmppo.engines.base import Generation, GenerationRequest
from llmppo.seeding import derive_seed
from llmppo.trajectories.episode import StopReason


class CountdownEnv:
    """A game of `turns` turns that accepts any text: observation `k left.`, reward 1 for a reply with a digit.

    Another reply is invalid and costs 0.5; the last turn terminates.
    """

    def __init__(self, turns: int = 4) -> None:
        self.turns, self.left, self.closed = turns, turns, False

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.left = self.turns
        return f"Game {(seed or 0) % 97}: {self.left} left.", {"task_id": f"game-{(seed or 0) % 97}"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        valid = any(character.isdigit() for character in action)
        return f"{self.left} left.", 1.0 if valid else -0.5, self.left == 0, False, {"invalid": not valid}

    def close(self) -> None:
        self.closed = True


class ScriptedEngine:
    """An engine whose replies come from a function of the request, with made-up log-probs.

    `reply(request)` gives the ids to "sample"; ids beyond `max_new_tokens` are cut with stop reason LENGTH,
    and a reply that doesn't end with one of `end_token_ids` counts as cut too.
    """

    def __init__(
        self, reply: Callable[[GenerationRequest], Sequence[int]], end_token_ids: Sequence[int]
    ) -> None:
        self.reply, self.end_token_ids, self.decode_steps = reply, frozenset(end_token_ids), 0
        self.requests: list[GenerationRequest] = []

    def generate(self, requests: Sequence[GenerationRequest], *, greedy: bool = False) -> list[Generation]:
        generations = []
        for request in requests:
            self.requests.append(request)
            ids = list(self.reply(request))[: request.max_new_tokens]
            ended = bool(ids) and ids[-1] in self.end_token_ids
            noise = np.random.default_rng(derive_seed("scripted", request.seed))
            generations.append(
                Generation(
                    token_ids=ids,
                    logprobs=-noise.exponential(size=len(ids)).astype(np.float32),
                    stop_reason=StopReason.EOS if ended else StopReason.LENGTH,
                )
            )
        self.decode_steps += max((len(generation.token_ids) for generation in generations), default=0)
        return generations
