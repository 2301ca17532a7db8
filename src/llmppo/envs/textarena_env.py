"""Games of TextArena as text environments: the policy is player 0, an opponent (if any) is a function.

A game is made afresh for each episode, without the library's wrappers, which keep the history of the episode
before. Its draws come from an episode's own random state. The library pays at the end only: the last step
carries the reward, and what a game pays for being broken off by a second invalid move is replaced by
`invalid_reward`. Training and evaluation share no instance: a hash of what a reset has drawn decides the split.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from llmppo.envs.isolation import GlobalRandom
from llmppo.envs.scripted import Player, careless, demonstrate, play
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.files import canonical_json, digest
from llmppo.imports import load_callable
from llmppo.seeding import derive_seed

LEARNER = 0
ATTEMPTS = 1000  # resets after which a split counts as empty
CHOICE_GAMES = 512  # training games that the best constant reply is chosen on
MOVE = re.compile(r"\[[^\[\]\s][^\[\]]*\]")


class TextArena:
    """One game; an episode succeeds when the game pays 1 (solved, or won).

    Args:
        game: Id in the library without a suffix, such as `Secretary-v0`.
        settings: Keyword arguments of the game's class.
        actions: Replies of random and of constant play, the floors of the report.
        players: Name to `module:function` of a scripted player (`envs.scripted.Player`) to measure as well.
        opponent: `module:function` of a scripted player for the second seat; None for one-player games.
        held_out: Share of the instances that only evaluation plays; 0 for a game that starts the same always.
        invalid_reward: Reward of a game that the policy's second invalid move in a row breaks off.

    Raises:
        ConfigError: naming the argument that can't be used.
    """

    def __init__(
        self,
        game: str,
        settings: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        players: Mapping[str, str] | None = None,
        opponent: str | None = None,
        held_out: float = 0.2,
        invalid_reward: float = -1.0,
    ) -> None:
        if not 0 <= held_out < 1:
            raise ConfigError(f"env.kwargs.held_out: {held_out}; it is a share, at least 0 and below 1")
        self.game, self.settings, self.actions = game, dict(settings or {}), list(actions)
        self.held_out, self.invalid_reward = held_out, invalid_reward
        self._scripted: dict[str, Player] = {
            name: load_callable(player, f"env.kwargs.players.{name}")
            for name, player in (players or {}).items()
        }
        self._opponent: Player | None = load_callable(opponent, "env.kwargs.opponent") if opponent else None
        self._seats = 1 if opponent is None else 2
        self._game: Any = None
        _check_game(game, canonical_json(self.settings), self._seats)

    def reset(self, seed: int | None = None, *, evaluation: bool = False) -> tuple[str, dict[str, Any]]:
        """Start a game of the split; which one depends on `seed` and `evaluation` alone (seed None draws afresh)."""
        seed = random.SystemRandom().getrandbits(62) if seed is None else seed
        for attempt in range(ATTEMPTS):
            instance = self._start(derive_seed("textarena", seed, attempt))
            share = int(instance, 16) / 16 ** len(instance)
            if self.held_out == 0 or (share < self.held_out) == evaluation:
                self._instance = instance
                return self._play_opponent(), {"task_id": instance}
        raise EnvironmentFault(
            f"{self.game}: {ATTEMPTS} resets gave no {'held-out' if evaluation else 'training'} instance; "
            "a game with so few instances can't be split, set env.kwargs.held_out: 0"
        )

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move, and the opponent's after it: (what the policy sees next, reward, terminated, truncated, info)."""
        if self._game is None or self._game.state.done:
            raise EnvironmentFault(
                f"{self.game}: the game is over or was never started; call reset before step"
            )
        state = self._game.state
        with self._random.installed():
            done, _ = self._game.step(action)
        broken_off = bool(state.game_info[LEARNER]["invalid_move"])
        # One invalid move is forgiven: the game counts it and asks again.
        invalid = broken_off or getattr(state, "error_count", 0) > 0
        observation = self._read(LEARNER) if invalid or done else self._play_opponent()
        reward = 0.0
        if state.done:
            reward = self.invalid_reward if broken_off else float(self._game.close()[0][LEARNER])
        info = {
            "success": state.done and not broken_off and reward >= 1.0,
            "invalid": invalid,
            "task_id": self._instance,
        }
        return observation, reward, bool(state.done), False, info

    def players(self) -> dict[str, Player]:
        """Random play and the best constant reply of `actions`, and the players of the config."""
        if not self.actions:
            return self._scripted
        best = max(self.actions, key=self._constant_return)
        floors: dict[str, Player] = {
            "random play": _random_reply(self.actions),
            "best constant reply": lambda rng, texts: best,
        }
        return {**floors, **self._scripted}

    def notes(self) -> list[str]:
        if self.held_out == 0:
            return ["Evaluation plays games of its own seeds, but no instance of the game is held out."]
        return [
            f"Evaluation plays instances of the game that training never sees: a share of {self.held_out:g}, by a hash.",
            "The best constant reply is chosen on training games and scored on held-out ones.",
        ]

    def _start(self, seed: int) -> str:
        """Set up a game from `seed`; returns a hash of what it drew."""
        self._opponent_rng = random.Random(derive_seed("opponent", seed))
        self._texts: list[str] = []
        self._game, self._random, instance = _start(self.game, self.settings, self._seats, seed)
        return instance

    def _play_opponent(self) -> str:
        """Let the opponent move until it is the policy's turn; returns what the policy sees."""
        state = self._game.state
        while self._opponent is not None and not state.done and state.current_player_id != LEARNER:
            self._texts.append(self._read(state.current_player_id))
            reply = self._opponent(self._opponent_rng, self._texts)
            self._texts.append(reply)
            with self._random.installed():
                self._game.step(reply)
        return self._read(LEARNER)

    def _read(self, player: int) -> str:
        """What a player was told since last time, less its own moves."""
        state = self._game.state
        messages, state.observations[player] = state.observations[player], []
        return "\n".join(message for sender, message, _ in messages if sender != player).strip()

    def _constant_return(self, reply: str) -> float:
        games = [
            play(self, lambda rng, texts: reply, seed=seed, rng=random.Random(seed), max_turns=100)
            for seed in range(CHOICE_GAMES)
        ]
        return sum(game.success for game in games) / len(games)


def _random_reply(actions: Sequence[str]) -> Player:
    return lambda rng, texts: rng.choice(actions)


def random_listed_move(rng: random.Random, texts: Sequence[str]) -> str:
    """A player for games that list the moves, as `[move]`, in the last line of what they say."""
    moves = MOVE.findall(texts[-1].splitlines()[-1])
    return rng.choice(moves) if moves else ""


def demonstration(
    rng: random.Random,
    game: str,
    actions: Sequence[str],
    max_turns: int = 100,
    player: str | None = None,
    skilled: float = 0.0,
    malformed: float = 0.0,
    **kwargs: Any,
) -> list[tuple[str, str]]:
    """A warm-start dialogue: a training game with replies drawn from `actions`.

    A share `skilled` of the games is played by the scripted `player` (`module:function`); a share `malformed`
    of the replies lacks its last character. `kwargs` are those of `TextArena`.
    """
    env = TextArena(game, actions=actions, **kwargs)
    scripted: Player = _random_reply(actions)
    if player is not None and rng.random() < skilled:
        scripted = load_callable(player, "base_model.warm_start.kwargs.player")
    observation, _ = env.reset(seed=rng.getrandbits(62))
    return demonstrate(env, observation, careless(scripted, rng, malformed), max_turns)


def _start(game: str, settings: Mapping[str, Any], seats: int, seed: int) -> tuple[Any, GlobalRandom, str]:
    """A fresh game without wrappers, the random state it goes on with, and a hash of what it drew."""
    import textarena

    state = GlobalRandom(seed)
    with state.installed():
        made = textarena.make(f"{game}-raw", **settings)
        made.reset(num_players=seats, seed=seed % 2**32)
    told = [message for _, message, _ in made.state.observations[LEARNER]]
    return made, state, digest(json.dumps([made.state.game_state, told], sort_keys=True, default=str))


@lru_cache(maxsize=64)
def _check_game(game: str, settings: str, seats: int) -> None:
    """Raise ConfigError if the game can't be played here, or draws otherwise for the same seed."""
    try:
        with GlobalRandom(0).installed():  # importing a game may draw, too; only the first time, though
            import textarena

            textarena.make(f"{game}-raw", **json.loads(settings))
        instances = {_start(game, json.loads(settings), seats, seed=1)[2] for _ in range(2)}
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"TextArena or what the game needs is missing ({error}); install it with: make tasks"
        ) from None
    except LookupError:
        raise ConfigError(
            f"env.kwargs.game: {game} needs NLTK's word lists, which come by download only"
        ) from None
    except Exception as error:  # of 80 games each has its own way to say what it can't do
        raise ConfigError(
            f"env.kwargs: TextArena can't start {game!r} with {settings} and {seats} players: {type(error).__name__}: {error}"
        ) from None
    if len(instances) > 1:
        raise ConfigError(
            f"env.kwargs.game: {game} draws from somewhere that no seed reaches, so no run could be repeated; choose another game"
        )
