"""Rows of a question-answer dataset, checked one by one; `dataset_files` has the formats.

A row is a JSON object with `question` (text) and `answer` (text or number) and whatever else a reward
function wants. Training and held-out rows share no question.
"""

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from llmppo.envs.dataset_files import read_file
from llmppo.errors import ConfigError
from llmppo.files import files_of

Row = dict[str, Any]
SHOWN = 5  # shared rows that a message names


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
    for name, value in row.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: `{name}` can't be stored as JSON: {error}") from None
    return {**row, "answer": str(row["answer"])}


def read_rows(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """Rows of a dataset file or folder, in order. Raises ConfigError naming file and line or row."""
    rows = tuple(check_row(row, where) for where, row in read_file(path))
    if not rows:
        raise ConfigError(f"{path} has no rows")
    return rows


def read_dataset(
    train: str | os.PathLike[str], held_out: str | os.PathLike[str]
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Training and held-out rows, checked to be disjoint. Cached: an environment is made for each episode."""
    return _read_dataset(Path(train), _state(train), Path(held_out), _state(held_out))


def _state(path: str | os.PathLike[str]) -> tuple[tuple[int, int], ...]:
    """What changes when a file is written again."""
    try:
        states = [file.stat() for file in files_of(path)]
    except OSError as error:
        raise ConfigError(f"dataset file {path} can't be read: {error.strerror}") from None
    return tuple((state.st_mtime_ns, state.st_size) for state in states)


def read_rows_once(path: str | os.PathLike[str]) -> tuple[Row, ...]:
    """`read_rows`, cached until the file changes."""
    return _read_rows_once(Path(path), _state(path))


@lru_cache(maxsize=8)
def _read_rows_once(path: Path, state: tuple[tuple[int, int], ...]) -> tuple[Row, ...]:
    return read_rows(path)


@lru_cache(maxsize=8)
def _read_dataset(
    train: Path,
    train_state: tuple[tuple[int, int], ...],
    held_out: Path,
    held_out_state: tuple[tuple[int, int], ...],
) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    rows = read_rows_once(train), read_rows_once(held_out)
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
        named = "; ".join(
            f"{names[1]}, row {number} asks what {names[0]}, row {trained[content(row)]} asks: {row['question']!r}"
            for number, row in shared[:SHOWN]
        )
        raise ConfigError(
            f"{named} ({len(shared)} of {len(held_out)} held-out rows are in training too); held-out rows must be new"
        )
