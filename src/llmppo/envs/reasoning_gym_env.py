"""Tasks of reasoning-gym as a dataset: `generate` makes the rows, `solved` or `score` is the reward.

    dataset: {generator: "llmppo.envs.reasoning_gym_env:generate", kwargs: {tasks: {gcd: {}}}}
    env: {factory: "llmppo.envs.dataset_env:DatasetEnv",
          kwargs: {reward: "llmppo.envs.reasoning_gym_env:solved"}, max_turns: 1}

Rows are drawn once, freed of repeated questions and then split, because items of neighbouring seeds of the
library are the same. A task whose own answer isn't scored 1, or which rewards nonsense, is refused when rows
are made. The library's global random draws are kept away from everyone else's.
"""

import json
import random
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from llmppo.envs.dataset_rows import Row, content
from llmppo.envs.isolation import GlobalRandom
from llmppo.errors import ConfigError
from llmppo.files import canonical_json
from llmppo.seeding import derive_seed

Tasks = Mapping[str, Mapping[str, Any]]
"""Name of a task to the settings of its config class, `seed` and `size` excepted."""

DRAWS_PER_ROW = 20  # draws after which a task counts as out of new questions
CONSOLATION = 0.05  # what some tasks pay for any answer at all
NONSENSE = ("", "@@", "no such answer")
ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def generate(seed: int, tasks: Tasks, train: int = 500, eval: int = 100) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows with distinct questions, equally many of each task.

    Raises:
        ConfigError: for an unknown task or setting, a task with too few questions, or one whose scoring is broken.
    """
    if not tasks or min(train, eval) < len(tasks):
        raise ConfigError(
            f"dataset.kwargs: {train} training and {eval} held-out rows of {len(tasks)} tasks; "
            "name at least one task, and ask for at least one row of each kind a task"
        )
    parts: tuple[list[Row], list[Row]] = ([], [])
    for number, (task, settings) in enumerate(tasks.items()):
        wanted = [(rows + number) // len(tasks) for rows in (train, eval)]
        drawn = _distinct_rows(task, settings, seed, sum(wanted))
        parts[0].extend(drawn[: wanted[0]])
        parts[1].extend(drawn[wanted[0] :])
    for split, rows in zip(("train", "eval"), parts, strict=True):
        random.Random(derive_seed("reasoning-gym", seed, split)).shuffle(rows)
    return parts


def solved(completion: str, answer: str, question: str, row: Row) -> float:
    """1 if the library accepts the completion in full, else 0."""
    return float(_library_score(completion, row) == 1)


def score(completion: str, answer: str, question: str, row: Row) -> tuple[float, dict[str, bool]]:
    """The library's score in 0..1, which may give credit for a part; a consolation for anything at all counts 0."""
    value = _library_score(completion, row)
    return (value if value > CONSOLATION else 0.0), {"success": value == 1}


def demonstration(
    rng: random.Random, seed: int, tasks: Tasks, train: int = 500, eval: int = 100, right: float = 0.3
) -> list[tuple[str, str]]:
    """A warm-start dialogue on a training row of `generate` with the same arguments.

    The answer is the row's own with probability `right`, else that of another training row of its task.
    """
    rows = _training_rows(seed, canonical_json(tasks), train, eval)
    row = rng.choice(rows)
    if rng.random() < right:
        return [(row["question"], row["answer"])]
    return [
        (row["question"], rng.choice([other for other in rows if other["task"] == row["task"]])["answer"])
    ]


@lru_cache(maxsize=1)
def _training_rows(seed: int, tasks: str, train: int, eval: int) -> list[Row]:
    return generate(seed, json.loads(tasks), train, eval)[0]


def _distinct_rows(task: str, settings: Mapping[str, Any], seed: int, wanted: int) -> list[Row]:
    """`wanted` rows with distinct questions, in random order."""
    draws = DRAWS_PER_ROW * wanted
    task_seed = derive_seed("reasoning-gym", task, seed) % 2**31
    rows: dict[str, Row] = {}
    with GlobalRandom(task_seed).installed():
        dataset = _make(task, {**settings, "seed": task_seed, "size": draws})
        for index in range(draws):
            if len(rows) == wanted:
                break
            row = _row(task, settings, dataset[index])
            if content(row) not in rows:
                _check_scoring(row)
                rows[content(row)] = row
    if len(rows) < wanted:
        raise ConfigError(
            f"dataset.kwargs.tasks.{task}: {wanted} rows asked, but {draws} draws gave {len(rows)} different questions; "
            "ask for fewer rows or widen the task's settings"
        )
    # Frequent questions are drawn early: without a shuffle the held-out rows would be the rare ones.
    shuffled = list(rows.values())
    random.Random(task_seed).shuffle(shuffled)
    return shuffled


def _row(task: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> Row:
    if not isinstance(entry["answer"], str):
        raise ConfigError(
            f"dataset.kwargs.tasks.{task}: the library has no answer to {entry['question']!r} (it says "
            f"{entry['answer']!r}), so it can't be checked or shown; choose another task"
        )
    row = {"question": entry["question"], "answer": entry["answer"], "task": task, "settings": dict(settings)}
    try:
        # What scoring reads comes back from a file, so it goes through JSON before it is checked.
        return {**row, "metadata": json.loads(json.dumps(entry["metadata"]))}
    except TypeError as error:
        raise ConfigError(f"dataset.kwargs.tasks.{task}: its metadata can't be stored: {error}") from None


def _check_scoring(row: Row) -> None:
    """Raise ConfigError unless the row's own answer scores 1 and nonsense 0."""
    if _library_score(row["answer"], row) != 1:
        raise ConfigError(
            f"dataset.kwargs.tasks.{row['task']}: the library scores its own answer {row['answer']!r} with "
            f"{_library_score(row['answer'], row)}, so nothing can be learned from it; choose another task"
        )
    for text in NONSENSE:
        if _library_score(text, row) == 1:
            raise ConfigError(
                f"dataset.kwargs.tasks.{row['task']}: the library scores the answer {text!r} with 1; choose another task"
            )


def _library_score(completion: str, row: Row) -> float:
    """Score of the last `<answer>` in the completion, else of all of it; 0 where the library can't read it."""
    tagged = ANSWER.findall(completion)
    text = (tagged[-1] if tagged else completion).strip()
    scorer = _scorer(row["task"], canonical_json(row["settings"]))
    with GlobalRandom(0).installed():
        try:
            return float(scorer.score_answer(text, row))
        except (
            Exception
        ):  # some tasks parse a reply without expecting nonsense, and raise whatever that gives
            return 0.0


@lru_cache(maxsize=64)
def _scorer(task: str, settings: str) -> Any:
    return _make(task, json.loads(settings))


def _make(task: str, settings: Mapping[str, Any]) -> Any:
    """A dataset of the library. Raises ConfigError for an unknown task or a setting that it refuses."""
    try:
        # The package first: its registry fills while it is imported, and only `import` of it waits for a
        # thread that is at it.
        import reasoning_gym
        from reasoning_gym.factory import DATASETS, create_dataset

        assert reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigError(f"reasoning-gym is missing ({error}); install it with: make tasks") from None
    if task not in DATASETS:
        raise ConfigError(
            f"dataset.kwargs.tasks: reasoning-gym has no task `{task}`; there are: {', '.join(sorted(DATASETS))}"
        )
    try:
        return create_dataset(task, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"dataset.kwargs.tasks.{task}: {error}") from None
