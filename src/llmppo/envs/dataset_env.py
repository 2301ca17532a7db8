"""A question-answer dataset as a single-turn environment: serve a question on reset, score it on step.

Rows come from files (see `dataset_files`), the score from a reward function or several (see `rubric`).
Training takes rows of `train_path`, evaluation those of `eval_path`. `demonstration` makes warm-start
dialogues of the same rows.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from llmppo.envs.dataset_rows import Row, check_row, read_dataset, read_rows_once
from llmppo.envs.rewards import exact_match
from llmppo.envs.rubric import Reward, Rubric
from llmppo.envs.scripted import Player
from llmppo.errors import ConfigError, EnvironmentFault

Message = dict[str, str]
CONSTANT_CANDIDATES, CONSTANT_ROWS = 100, 500  # bound on the reward calls of the constant-answer floor


class DatasetEnv:
    """One question a time.

    Args:
        train_path, eval_path: Files or folders of disjoint rows.
        reward: `module:function`, or the function itself; `exact_match` if `rewards` isn't given either.
        rewards: A rubric instead: parts of `name`, `function`, `weight`, whose weighted sum is the reward.
        prompt: Text of a question; `{question}` and the row's other fields are filled in.
        examples: Worked examples, rows of `question` and `answer`, shown before the question.
        examples_as: `messages` (a user and an assistant message each) or `text` (all in one user message).
        system: System message.
    """

    def __init__(
        self,
        train_path: str | Path,
        eval_path: str | Path,
        reward: str | Callable[..., Any] | None = None,
        rewards: Sequence[Mapping[str, Any]] | None = None,
        prompt: str = "{question}",
        examples: Sequence[Mapping[str, Any]] = (),
        examples_as: Literal["messages", "text"] = "messages",
        system: str | None = None,
    ) -> None:
        self.train_rows, self.eval_rows = read_dataset(train_path, eval_path)
        if reward is not None and rewards is not None:
            raise ConfigError("env.kwargs: give either `reward` or `rewards`, not both")
        self.reward: Reward | Rubric = (
            Reward.load(reward or exact_match, "env.kwargs.reward") if rewards is None else Rubric(rewards)
        )
        self.prompt, self.system, self.examples_as = prompt, system, examples_as
        if examples_as not in ("messages", "text"):
            raise ConfigError(f"env.kwargs.examples_as: {examples_as!r}; accepted: messages, text")
        self.examples = [
            check_row(row, f"env.kwargs.examples, row {number}") for number, row in enumerate(examples, 1)
        ]
        _check_prompt(prompt, [*self.examples, self.train_rows[0]])
        self._row: Row | None = None
        self._where, self._cursor, self._cursor_split = "", 0, ""

    @property
    def dataset_size(self) -> int:
        """Number of training rows."""
        return len(self.train_rows)

    def reset(
        self, seed: int | None = None, *, row_index: int | None = None, evaluation: bool | None = None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Serve row `row_index` (modulo the rows of the split), else one drawn from `seed`, else the next."""
        split, rows = ("eval", self.eval_rows) if evaluation else ("train", self.train_rows)
        if row_index is None and seed is not None:
            row_index = random.Random(seed).randrange(len(rows))
        elif row_index is None:
            self._cursor = self._cursor + 1 if split == self._cursor_split else 0
            self._cursor_split, row_index = split, self._cursor
        number = row_index % len(rows)
        self._row, self._where = rows[number], f"{split}-{number}"
        return self._messages(rows[number]), {"task_id": self._where}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Score the reply; the episode is over."""
        if self._row is None:
            raise EnvironmentFault("DatasetEnv.step: no question was served; call reset first")
        reward, info = self.reward(action, self._row, self._where)
        return "", reward, True, False, info

    def players(self) -> dict[str, Player]:
        """The answer to a random training question; a valid one, where the reward function lists those."""
        choices = self.reward.choices
        if choices is None:
            return {"random answer": lambda rng, texts: rng.choice(self.train_rows)["answer"]}

        def pick(rng: random.Random, texts: Sequence[str]) -> str:
            assert self._row is not None, "a player replies to a question that was served"
            return rng.choice(choices(self._row["question"]))

        return {"valid random pick": pick}

    def references(self) -> dict[str, float]:
        """Success on the held-out rows of the best constant answer, and of a valid answer at random."""
        rates = {"best constant answer": self._constant_success()}
        choices = self.reward.choices
        if choices is not None:
            rates["valid random pick"] = _mean(
                _mean(self._succeeds(choice, row) for choice in choices(row["question"]))
                for row in self.eval_rows
            )
        return rates

    def notes(self) -> list[str]:
        return [
            f"{len(self.eval_rows)} questions are held out for evaluation; none of them is among the "
            f"{len(self.train_rows)} questions of training.",
            "The best constant answer is chosen on training questions and scored on held-out ones.",
        ]

    def _constant_success(self) -> float:
        common = Counter(row["answer"] for row in self.train_rows).most_common(CONSTANT_CANDIDATES)
        rows = self.train_rows[:CONSTANT_ROWS]
        best = max((answer for answer, _ in common), key=lambda answer: self._rate(answer, rows))
        return self._rate(best, self.eval_rows)

    def _rate(self, completion: str, rows: Sequence[Row]) -> float:
        return _mean(self._succeeds(completion, row) for row in rows)

    def _succeeds(self, completion: str, row: Row) -> bool:
        reward, info = self.reward(completion, row, repr(row["question"]))
        return bool(info.get("success", reward >= 1.0))

    def _messages(self, row: Row) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        question = self.prompt.format(**row)
        shown = [(self.prompt.format(**example), example["answer"]) for example in self.examples]
        if self.examples_as == "text":
            text = "\n\n".join([*(f"{asked} {answer}" for asked, answer in shown), question])
            return [*system, {"role": "user", "content": text}]
        dialogue = []
        for asked, answer in shown:
            dialogue += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return [*system, *dialogue, {"role": "user", "content": question}]


def demonstration(
    rng: random.Random, path: str, right: float = 0.0, prompt: str = "{question}"
) -> list[tuple[str, str]]:
    """A warm-start dialogue: a question of the file and an answer, which shows the form of answers.

    The answer is the row's own with probability `right`, else that of any row: what a model knows that has
    seen which answers there are. Give training rows only.
    """
    rows = read_rows_once(path)
    row = rng.choice(rows)
    source = row if rng.random() < right else rng.choice(rows)
    return [(prompt.format(**row), source["answer"])]


def _mean(values: Any) -> float:
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers)


def _check_prompt(prompt: str, rows: Sequence[Row]) -> None:
    """Raise ConfigError if the prompt can't be filled from one of the rows."""
    try:
        fields = {name for _, name, _, _ in Formatter().parse(prompt) if name is not None}
    except ValueError as error:
        raise ConfigError(f"env.kwargs.prompt: {error}; write {{{{ and }}}} for braces in the text") from None
    if not fields:
        raise ConfigError("env.kwargs.prompt: it has no `{question}`, so every row would ask the same")
    for row in rows:
        unknown = sorted(fields - set(row))
        if unknown:
            raise ConfigError(
                f"env.kwargs.prompt: no field `{unknown[0]}` in the row {row}; write {{{{ and }}}} for braces in the text"
            )
