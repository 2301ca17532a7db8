"""Scripted players: a policy made of code, played through an environment to measure a floor.

An environment may offer `players() -> {name: Player}`, `references() -> {name: exact success rate}` and
`notes() -> [text]`; the `baselines` stage asks for them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llmppo.envs.protocol import info_flag, reset_environment, step_environment

Player = Callable[[random.Random, Sequence[str]], str]
"""A reply to an episode's texts so far: observation, reply, observation, ... (an observation comes last)."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """Outcome of one scripted episode."""

    episode_return: float
    success: bool


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
    """Play one episode. Raises EnvironmentFault where the environment leaves its protocol."""
    arguments = {"seed": seed, "row_index": row_index, "evaluation": evaluation}
    name = f"of a scripted player, seed {seed}"
    texts = [reset_environment(env, name, arguments).messages[-1]["content"]]
    total, said = 0.0, None
    for _ in range(max_turns):
        action = player(rng, texts)
        step = step_environment(env, name, action)
        total += step.reward
        said = info_flag(env, name, step.info, "success", "correct")
        texts += [action, step.observation]
        if step.terminated or step.truncated:
            break
    return Played(episode_return=total, success=total >= success_threshold if said is None else said)


def demonstrate(
    env: Any, observation: str, reply: Callable[[Sequence[str]], str], max_turns: int | None = None
) -> list[tuple[str, str]]:
    """Play a begun game to its end, as (observation, action) pairs for a warm start.

    `reply` gets the game's texts so far, as a `Player` does.
    """
    texts, over = [observation], False
    dialogue: list[tuple[str, str]] = []
    while not over and (max_turns is None or len(dialogue) < max_turns):
        action = reply(texts)
        dialogue.append((texts[-1], action))
        answer, _, terminated, truncated, _ = env.step(action)
        texts += [action, answer]
        over = terminated or truncated
    return dialogue


def careless(player: Player, rng: random.Random, malformed: float) -> Callable[[Sequence[str]], str]:
    """`player` with `rng`, but a share `malformed` of its replies lacks the last character."""

    def reply(texts: Sequence[str]) -> str:
        action = player(rng, texts)
        return action[:-1] if rng.random() < malformed else action

    return reply
