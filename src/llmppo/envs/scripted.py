"""Scripted players: a policy made of code, played through an environment to measure a floor.

An environment may offer `players() -> {name: Player}`, `references() -> {name: exact success rate}` and
`notes() -> [text]`; the `baselines` stage asks for them.
"""

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmppo.errors import EnvironmentFault

Player = Callable[[random.Random, Sequence[str]], str]
"""A reply to an episode's texts so far: observation, reply, observation, ... (an observation comes last)."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """Outcome of one scripted episode."""

    episode_return: float
    success: bool
    turns: int


def play(
    env: Any,
    player: Player,
    *,
    seed: int,
    rng: random.Random,
    max_turns: int,
    success_threshold: float = 1.0,
    row_index: int | None = None,
    evaluation: bool = False,
) -> Played:
    """Play one episode; `reset` gets those of `seed`, `row_index` and `evaluation` that it accepts."""
    parameters = inspect.signature(env.reset).parameters
    wanted = {"seed": seed, "row_index": row_index, "evaluation": evaluation}
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    start = env.reset(**{key: value for key, value in wanted.items() if every or key in parameters})
    texts = [start[0] if isinstance(start, tuple) else start]
    total, turns = 0.0, 0
    info: Mapping[str, Any] = {}
    for turns in range(1, max_turns + 1):  # noqa: B007, the count is part of the outcome
        action = player(rng, texts)
        result = env.step(action)
        if not isinstance(result, tuple) or len(result) != 5:
            raise EnvironmentFault(
                f"{type(env).__name__}.step must return (observation, reward, terminated, truncated, info), got {result!r}"
            )
        observation, reward, terminated, truncated, info = result
        total += float(reward)
        texts += [action, observation]
        if terminated or truncated:
            break
    success = info.get("success", info.get("correct", total >= success_threshold))
    return Played(episode_return=total, success=bool(success), turns=turns)
