"""Reward functions for question-answer datasets: `reward(completion, answer, question)`.

A reward function returns a number, or `(number, info)` where `info` may hold `success` and `invalid`. An
attribute `choices`, a function of the question, lists the valid answers where there are few; with it the
`baselines` stage knows what a valid random pick scores.
"""

import re
from collections.abc import Callable
from typing import Any

INVALID_CHOICE = -0.5
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def normalise(text: str) -> str:
    """Lower case, single spaces, no punctuation at the ends."""
    return " ".join(text.split()).strip(" .,!?:;\"'").casefold()


def exact_match(completion: str, answer: str, question: str) -> float:
    """1 if the completion is the answer up to case, spaces and punctuation at the ends, else 0."""
    return float(normalise(completion) == normalise(answer))


def contains_answer(completion: str, answer: str, question: str) -> float:
    """1 if the answer stands in the completion as whole words, else 0."""
    wanted = re.escape(normalise(answer))
    return float(re.search(rf"(?<!\w){wanted}(?!\w)", " ".join(completion.split()).casefold()) is not None)


def numbers_in(question: str) -> list[str]:
    """The distinct numbers that a question names, in order."""
    return list(dict.fromkeys(NUMBER.findall(question)))


def with_choices(choices: Callable[[str], list[str]]) -> Callable[[Any], Any]:
    """Decorator that tells which answers to a question are valid."""

    def mark(reward: Any) -> Any:
        reward.choices = choices
        return reward

    return mark


@with_choices(numbers_in)
def number_choice(completion: str, answer: str, question: str) -> tuple[float, dict[str, bool]]:
    """1 for the right one of the numbers in the question, 0 for another of them, -0.5 for anything else.

    The completion is the bare number; a full stop after it is accepted.
    """
    given = completion.strip().removesuffix(".")
    if given not in numbers_in(question):
        return INVALID_CHOICE, {"success": False, "invalid": True}
    return float(given == answer), {"success": given == answer, "invalid": False}


def one_word(completion: str, answer: str, question: str) -> float:
    """1 if the completion is a single word, else 0: a format reward, for a rubric beside one on content."""
    return float(len(completion.split()) == 1)
