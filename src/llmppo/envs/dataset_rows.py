"""Rows of a question-answer dataset: JSONL files, checked line by line.

A row is a JSON object with `question` (text) and `answer` (text or number) and whatever else a reward
function wants. Training and held-out rows share no question.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmppo.errors import ConfigError

Row = dict[str, Any]


def check_row(row: Any, where: str) -> Row:
    """The row with its answer as text. Raises ConfigError opening with `where`."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: a row is a JSON object with `question` and `answer`, got {row!r}")
    for name, kinds in (("question", (str,)), ("answer", (str, int, float))):
        if name not in row:
            fields = ", ".join(map(str, row)) or "none"
            raise ConfigError(f"{where}: no field `{name}`; the row has: {fields}")
        if not isinstance(row[name], kinds) or isinstance(row[name], bool):
            raise ConfigError(
                f"{where}: `{name}` is {row[name]!r}, not a text{' or a number' * (len(kinds) > 1)}"
            )
    return {**row, "answer": str(row["answer"])}


def read_rows(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """Rows of a JSONL file; empty lines are skipped. Raises ConfigError naming file and line."""
    rows = []
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset file {path} can't be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None
        rows.append(check_row(row, where))
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return tuple(rows)


def read_dataset(
    train: str | os.PathLike[str], held_out: str | os.PathLike[str]
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Training and held-out rows, checked to be disjoint. Cached: an environment is made for each episode."""
    return _read_dataset(Path(train), _state(train), Path(held_out), _state(held_out))


def _state(path: str | os.PathLike[str]) -> tuple[int, int]:
    """What changes when a file is written again."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ConfigError(f"dataset file {path} can't be read: {error.strerror}") from None
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=8)
def _read_dataset(
    train: Path, train_state: tuple[int, int], held_out: Path, held_out_state: tuple[int, int]
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    rows = read_rows(train), read_rows(held_out)
    check_disjoint(*rows, (str(train), str(held_out)))
    return rows


def content(row: Mapping[str, Any]) -> str:
    """What makes two rows the same task: the question, whatever its spacing and case."""
    return " ".join(row["question"].split()).casefold()


def check_disjoint(train: Sequence[Row], held_out: Sequence[Row], names: tuple[str, str]) -> None:
    """Raise ConfigError if a held-out question is also trained on; `names` are the two sources."""
    trained = {content(row): number for number, row in enumerate(train, start=1)}
    shared = [(number, row) for number, row in enumerate(held_out, start=1) if content(row) in trained]
    if shared:
        number, row = shared[0]
        raise ConfigError(
            f"{names[1]}, row {number} asks what {names[0]}, row {trained[content(row)]} asks: {row['question']!r} "
            f"({len(shared)} of {len(held_out)} held-out rows are in training too); held-out rows must be new"
        )
