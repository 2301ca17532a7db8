"""Generator of a single-turn task: which of two numbers is larger?

Training and held-out rows share no pair, in either order. Rows are made for the reward `number_choice`.
"""

import random
from typing import Any

from llmppo.errors import ConfigError


def generate(
    seed: int, train: int = 2000, eval: int = 200, low: int = 1, high: int = 99
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """`train` and `eval` rows of distinct pairs low <= a, b <= high, each in random order.

    Raises ConfigError when the range has too few pairs.
    """
    span = high - low + 1
    available = max(0, span * (span - 1) // 2)
    if min(train, eval) < 1 or train + eval > available:
        raise ConfigError(
            f"dataset.kwargs: {train} training and {eval} held-out rows asked of {available} pairs in {low}..{high}; "
            "ask for at least one each, and not more than there are pairs"
        )
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a + 1, high + 1)]
    rows = [_row(*rng.sample(pair, 2)) for pair in rng.sample(pairs, train + eval)]
    return rows[:train], rows[train:]


def _row(first: int, second: int) -> dict[str, Any]:
    return {"question": f"Larger of {first} and {second}?", "answer": str(max(first, second))}
