"""Rewards of a dataset: one function, or a rubric of several with names and weights.

A reward function takes `(completion, answer, question)`, and `row` where it asks for the whole row. It
returns a number, or `(number, info)`; `info` may hold `success` and `invalid`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmppo.errors import RAISED_BY_USERS, ConfigError, EnvironmentFault
from llmppo.imports import check_arguments, load_callable

RewardFunction = Callable[..., Any]
PART_KEYS = {"name", "function", "weight"}


@dataclass(frozen=True)
class Reward:
    """One reward function; `where` in a call names the row for messages."""

    function: RewardFunction
    takes_row: bool

    @classmethod
    def load(cls, reward: str | RewardFunction, key: str) -> "Reward":
        """From `module:function` or the function itself; `key` is the config key for messages."""
        function = load_callable(reward, key) if isinstance(reward, str) else reward
        if not callable(function):
            raise ConfigError(f"{key}: {function!r} is not of the form `module:function`")
        takes_row = "row" in inspect.signature(function).parameters
        extra = {"row": None} if takes_row else {}
        check_arguments(function, str(reward), key, extra, given=["completion", "answer", "question"])
        return cls(function, takes_row)

    @property
    def choices(self) -> Callable[[str], list[str]] | None:
        """The valid answers to a question, where the function lists them."""
        return getattr(self.function, "choices", None)

    def __call__(self, completion: str, row: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any]]:
        """Reward and info. Raises EnvironmentFault naming function and row."""
        name = f"{self.function.__module__}:{getattr(self.function, '__qualname__', self.function)}"
        extra = {"row": row} if self.takes_row else {}
        try:
            result = self.function(completion, row["answer"], row["question"], **extra)
        except RAISED_BY_USERS as error:
            raise EnvironmentFault(
                f"reward {name} raised {type(error).__name__} on row {where}: {error}"
            ) from error
        reward, info = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(reward, (int, float)) or not isinstance(info, Mapping):
            raise EnvironmentFault(
                f"reward {name} returned {result!r} on row {where}; it returns a number, or (number, info)"
            )
        try:
            return float(reward), dict(info)
        except OverflowError:
            raise EnvironmentFault(
                f"reward {name} returned a number beyond all floats on row {where}"
            ) from None


class Rubric:
    """Weighted sum of named rewards, called as one reward.

    The info of the parts is merged, the first part's word first, and `info["rewards"]` holds the unweighted
    value of each part. Success is the first part's: its info's `success`, else whether it gives 1 or more.

    Args:
        parts: Mappings of `name`, `function` (`module:function`, or the function) and `weight` (default 1).

    Raises:
        ConfigError: naming the part and key that can't be used.
    """

    def __init__(self, parts: Sequence[Mapping[str, Any]]) -> None:
        key = "env.kwargs.rewards"
        if not parts:
            raise ConfigError(f"{key}: it lists no reward; give at least one {{name, function, weight}}")
        self.parts: dict[str, tuple[Reward, float]] = {}
        for number, part in enumerate(parts, start=1):
            if not isinstance(part, Mapping) or not {"name", "function"} <= set(part) <= PART_KEYS:
                raise ConfigError(
                    f"{key}, part {number}: {part!r}; a part has `name`, `function` and perhaps `weight`"
                )
            name, weight = part["name"], part.get("weight", 1.0)
            if not isinstance(name, str) or not name or name in self.parts:
                raise ConfigError(
                    f"{key}, part {number}: name {name!r}; names are texts, each one stands once"
                )
            if isinstance(weight, bool) or not isinstance(weight, (int, float)):
                raise ConfigError(f"{key}, part {number} ({name}): weight {weight!r} is not a number")
            self.parts[name] = Reward.load(part["function"], f"{key}, part {number} ({name})"), float(weight)

    @property
    def choices(self) -> Callable[[str], list[str]] | None:
        """The valid answers to a question, from the first part that lists them."""
        return next((reward.choices for reward, _ in self.parts.values() if reward.choices), None)

    def __call__(self, completion: str, row: Mapping[str, Any], where: str) -> tuple[float, dict[str, Any]]:
        """Total reward and info. Raises EnvironmentFault naming function and row."""
        total, values = 0.0, {}
        merged: dict[str, Any] = {}
        for name, (reward, weight) in self.parts.items():
            values[name], info = reward(completion, row, where)
            total += weight * values[name]
            if not merged:
                info.setdefault("success", values[name] >= 1.0)
            merged = {**info, **merged}
        return total, {**merged, "rewards": values}
