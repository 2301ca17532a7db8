"""Walk on a grid: from a start to a goal, both drawn, in a bounded number of moves.

An action is one of `[left]`, `[right]`, `[up]`, `[down]`; a step off the grid leaves the walker where it is.
Arriving ends the episode with reward 1; any other text gives `invalid_reward` and uses up a move. Training
and evaluation walk disjoint pairs of start and goal. `references` computes random and optimal play exactly.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

from llmppo.envs.scripted import Player, careless, demonstrate
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.seeding import derive_seed

Cell = tuple[int, int]
"""Column and row, counted from 0 at the lower left."""

MOVES: dict[str, Cell] = {"[left]": (-1, 0), "[right]": (1, 0), "[up]": (0, 1), "[down]": (0, -1)}
DEMONSTRATORS = {"random": 0.8, "optimal": 0.2}


class GridWalk:
    """One walk on a `size` x `size` grid of at most `moves` moves.

    `held_out` is the share of pairs of start and goal that only evaluation walks.
    """

    def __init__(
        self, size: int = 5, moves: int = 10, held_out: float = 0.2, invalid_reward: float = -0.25
    ) -> None:
        if size < 2 or moves < 1:
            raise ConfigError(f"env.kwargs: size ({size}) must be at least 2 and moves ({moves}) at least 1")
        self.size, self.moves, self.invalid_reward = size, moves, invalid_reward
        self.train_pairs, self.eval_pairs = split_pairs(size, held_out)
        self.goal: Cell | None = None
        self.moves_left = 0

    def reset(self, seed: int | None = None, *, evaluation: bool = False) -> tuple[str, dict[str, Any]]:
        """Start a walk of the split; which one depends on `seed` alone (None draws afresh)."""
        rng = random.Random(None if seed is None else derive_seed("grid walk", seed))
        self.cell, self.goal = rng.choice(self.eval_pairs if evaluation else self.train_pairs)
        self.moves_left = self.moves
        self._task = f"{_spell(self.cell)}-{_spell(self.goal)}"
        return f"Walk from {_spell(self.cell)} to {_spell(self.goal)} in {self.moves} moves.", {
            "task_id": self._task
        }

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make one move: (where the walker stands, reward, terminated, truncated, info)."""
        if self.goal is None or self.moves_left == 0:
            raise EnvironmentFault("GridWalk.step: the walk is over or was never started; call reset first")
        self.moves_left -= 1
        move = action.strip()
        invalid = move not in MOVES
        if not invalid:
            self.cell = _moved(self.cell, move, self.size)
        arrived = self.cell == self.goal
        if arrived:
            self.moves_left = 0
        reward = self.invalid_reward if invalid else float(arrived)
        info = {"success": arrived, "invalid": invalid, "task_id": self._task}
        text = "Arrived." if arrived else f"{'Invalid. ' * invalid}At {_spell(self.cell)}."
        return text, reward, self.moves_left == 0, False, info

    def references(self) -> dict[str, float]:
        """Exact success on the held-out pairs."""
        arrivals = [
            (_random_success(self.size, start, goal, self.moves), _distance(start, goal) <= self.moves)
            for start, goal in self.eval_pairs
        ]
        return {
            "random play": sum(chance for chance, _ in arrivals) / len(arrivals),
            "optimal play": sum(reachable for _, reachable in arrivals) / len(arrivals),
        }

    def players(self) -> dict[str, Player]:
        """The same two ways to walk, as functions of a walk's texts."""
        return {"random play": _random_move, "optimal play": _optimal_move}

    def notes(self) -> list[str]:
        return [
            f"Evaluation walks {len(self.eval_pairs)} held-out pairs of start and goal; none of them is among "
            f"the {len(self.train_pairs)} of training."
        ]


@cache
def split_pairs(size: int, held_out: float) -> tuple[list[tuple[Cell, Cell]], list[tuple[Cell, Cell]]]:
    """Pairs of start and goal for training and evaluation, the same for every environment of a size."""
    cells: list[Cell] = list(product(range(size), range(size)))
    pairs = [(start, goal) for start in cells for goal in cells if start != goal]
    random.Random(derive_seed("grid walk pairs", size)).shuffle(pairs)
    count = round(held_out * len(pairs))
    if not 0 < count < len(pairs):
        raise ConfigError(
            f"env.kwargs.held_out: {held_out} of {len(pairs)} pairs leaves nothing to train on or to evaluate; it is a share between 0 and 1"
        )
    return pairs[count:], pairs[:count]


def demonstration(
    rng: random.Random,
    size: int = 5,
    moves: int = 10,
    held_out: float = 0.2,
    players: Mapping[str, float] = DEMONSTRATORS,
    malformed: float = 0.05,
) -> list[tuple[str, str]]:
    """One training walk of a weak player, as (observation, action) pairs.

    `players` weighs `random` and `optimal`; a share `malformed` of the actions lacks a bracket.
    """
    walkers: dict[str, Player] = {"random": _random_move, "optimal": _optimal_move}
    unknown = sorted(set(players) - set(walkers))
    if unknown:
        raise ConfigError(
            f"base_model.warm_start.kwargs.players: no player `{unknown[0]}`; there are: {', '.join(walkers)}"
        )
    walker = walkers[rng.choices(list(players), weights=list(players.values()))[0]]
    walk = GridWalk(size, moves, held_out)
    observation, _ = walk.reset(seed=rng.getrandbits(62))
    return demonstrate(walk, observation, careless(walker, rng, malformed))


def _spell(cell: Cell) -> str:
    return f"{cell[0]},{cell[1]}"


def _cells(text: str) -> Iterator[Cell]:
    """The cells that a text names."""
    for word in text.replace(".", " ").split():
        column, comma, row = word.partition(",")
        if comma:
            yield int(column), int(row)


def _moved(cell: Cell, move: str, size: int) -> Cell:
    column, row = (min(max(place + step, 0), size - 1) for place, step in zip(cell, MOVES[move], strict=True))
    return column, row


def _distance(start: Cell, goal: Cell) -> int:
    return abs(start[0] - goal[0]) + abs(start[1] - goal[1])


def _random_move(rng: random.Random, texts: Sequence[str]) -> str:
    return rng.choice(list(MOVES))


def _optimal_move(rng: random.Random, texts: Sequence[str]) -> str:
    """A move that brings the walker nearer, at random where two do."""
    start, goal = _cells(texts[0])
    cell = next(_cells(texts[-1])) if len(texts) > 1 else start
    nearer = [
        move
        for move, (right, up) in MOVES.items()
        if _distance((cell[0] + right, cell[1] + up), goal) < _distance(cell, goal)
    ]
    return rng.choice(nearer)


@cache
def _random_success(size: int, cell: Cell, goal: Cell, moves: int) -> float:
    """Chance that uniform moves reach the goal in time, by recursion on the moves left."""
    if cell == goal:
        return 1.0
    if moves == 0:
        return 0.0
    return sum(_random_success(size, _moved(cell, move, size), goal, moves - 1) for move in MOVES) / len(
        MOVES
    )
