"""The default task: guess a number, with "Higher." or "Lower." after each try.

An action is the text `[k]`. A hit ends the episode with reward 1; any other text, or a number out of range,
gives `invalid_reward` and uses up a try. `references` computes the success of three ways to play exactly;
`players` plays them through the environment; `demonstration` makes warm-start dialogues of weak play.
"""

import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llmppo.envs.scripted import Player, demonstrate
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.seeding import derive_seed

ACTION = re.compile(r"\[([1-9][0-9]*)\]")
HIGHER, LOWER, INVALID, HIT = "Higher.", "Lower.", "Invalid.", "Correct."
STRATEGIES = ("random", "consistent", "optimal")
DEMONSTRATORS = {"random": 0.6, "consistent": 0.3, "optimal": 0.1}


def parse_action(text: str, numbers: int) -> int | None:
    """The guessed number, or None for text that isn't `[k]` with 1 <= k <= numbers."""
    match = ACTION.fullmatch(text.strip())
    if match is None or len(match[1]) > len(str(numbers)) or int(match[1]) > numbers:
        return None
    return int(match[1])


class GuessNumber:
    """One game: a secret in 1..numbers, at most `tries` guesses."""

    def __init__(self, numbers: int = 15, tries: int = 4, invalid_reward: float = -0.25) -> None:
        if numbers < 1 or tries < 1:
            raise ConfigError(f"env.kwargs: numbers ({numbers}) and tries ({tries}) must be at least 1")
        self.numbers, self.tries, self.invalid_reward = numbers, tries, invalid_reward
        self.secret: int | None = None
        self.tries_left = 0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start a game; the secret depends on `seed` alone (None draws afresh)."""
        # A hashed seed, so that a player whose generator has the same seed doesn't draw the secret.
        rng = random.Random(None if seed is None else derive_seed("secret", seed))
        self.secret = rng.randint(1, self.numbers)
        self.tries_left = self.tries
        return self.rules, {"task_id": str(self.secret)}

    @property
    def rules(self) -> str:
        """The first observation: everything a player needs to know."""
        return f"Guess my number from 1 to {self.numbers} in {self.tries} tries."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Judge one guess: (feedback, reward, terminated, truncated, info)."""
        if self.secret is None or self.tries_left == 0:
            raise EnvironmentFault(
                "GuessNumber.step: the game is over or was never started; call reset first"
            )
        self.tries_left -= 1
        guess = parse_action(action, self.numbers)
        hit, invalid = guess == self.secret, guess is None
        if hit:
            self.tries_left = 0
        if guess is None:
            feedback, reward = INVALID, self.invalid_reward
        elif hit:
            feedback, reward = HIT, 1.0
        else:
            feedback, reward = (HIGHER if guess < self.secret else LOWER), 0.0
        info = {"success": hit, "invalid": invalid, "task_id": str(self.secret)}
        return feedback, reward, self.tries_left == 0, False, info

    def references(self) -> dict[str, float]:
        """Exact success rates of the scripted players."""
        return {
            "random play": 1 - (1 - 1 / self.numbers) ** self.tries,
            "consistent play": _consistent_success(self.numbers, self.tries),
            "optimal play": min(1.0, (2**self.tries - 1) / self.numbers),
        }

    def players(self) -> dict[str, Player]:
        """The same ways to play, as functions of a game's texts."""
        return {f"{strategy} play": self._player(strategy) for strategy in STRATEGIES}

    def notes(self) -> list[str]:
        return [
            f"The task has {self.numbers} instances, and training sees all of them: evaluation samples "
            "games afresh, it doesn't hold instances back."
        ]

    def _player(self, strategy: str) -> Player:
        def play(rng: random.Random, texts: Sequence[str]) -> str:
            low, high = feasible_interval(texts, self.numbers)
            return f"[{_choose(strategy, rng, low, high, self.numbers)}]"

        return play


def feasible_interval(texts: Sequence[str], numbers: int) -> tuple[int, int]:
    """Lowest and highest number that the feedback leaves possible.

    `texts` alternate: rules, guess, feedback, guess, feedback, ...
    """
    low, high = 1, numbers
    for action, feedback in zip(texts[1::2], texts[2::2], strict=True):
        guess = parse_action(action, numbers)
        if guess is not None and feedback == HIGHER:
            low = max(low, guess + 1)
        if guess is not None and feedback == LOWER:
            high = min(high, guess - 1)
    return low, high


def _choose(strategy: str, rng: random.Random, low: int, high: int, numbers: int) -> int:
    if strategy == "random":
        return rng.randint(1, numbers)
    if strategy == "consistent":
        return rng.randint(low, high)
    return (low + high) // 2


def _consistent_success(numbers: int, tries: int) -> float:
    """Success of a uniform guess among the numbers still possible, by recursion on the interval's length.

    Of n candidates the guess g hits with chance 1/n; the secret lies below it with chance (g-1)/n, which leaves
    g-1 candidates, or above it with chance (n-g)/n.
    """

    @cache
    def success(n: int, left: int) -> float:
        if n == 0 or left == 0:
            return 0.0
        return sum(
            (1 + (g - 1) * success(g - 1, left - 1) + (n - g) * success(n - g, left - 1)) / n**2
            for g in range(1, n + 1)
        )

    return success(numbers, tries)


def demonstration(
    rng: random.Random,
    numbers: int = 15,
    tries: int = 4,
    players: Mapping[str, float] = DEMONSTRATORS,
    malformed: float = 0.05,
) -> list[tuple[str, str]]:
    """One dialogue of a weak player, as (observation, action) pairs.

    `players` weighs the strategies; a share `malformed` of the actions breaks the format or the range.
    """
    unknown = sorted(set(players) - set(STRATEGIES))
    if unknown:
        raise ConfigError(
            f"base_model.warm_start.kwargs.players: no player `{unknown[0]}`; there are: {', '.join(STRATEGIES)}"
        )
    strategy = rng.choices(list(players), weights=list(players.values()))[0]
    game = GuessNumber(numbers, tries)
    observation, _ = game.reset(seed=rng.getrandbits(62))

    def reply(texts: Sequence[str]) -> str:
        low, high = feasible_interval(texts, numbers)
        guess = _choose(strategy, rng, low, high, numbers)
        return _spoilt(rng, guess, numbers) if rng.random() < malformed else f"[{guess}]"

    return demonstrate(game, observation, reply)


def _spoilt(rng: random.Random, guess: int, numbers: int) -> str:
    return rng.choice([f"{guess}", f"[{guess}", f"{guess}]", f"[{guess + numbers}]"])
