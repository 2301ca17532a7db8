"""Dataset: `train.jsonl` and `eval.jsonl`, from a generator or from your own files, checked to be disjoint."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llmppo.config import DatasetConfig
from llmppo.envs.dataset_rows import Row, check_disjoint, check_row, read_dataset
from llmppo.errors import ConfigError
from llmppo.files import atomic_folder, digest, write_manifest
from llmppo.imports import load_callable


def run(settings: Mapping[str, Any], *, out: Path) -> str:
    """Write the dataset folder `out`. Raises ConfigError naming the row that can't be used."""
    if settings["dataset"] is None:
        raise ConfigError("dataset: the experiment has no `dataset` section, so there is nothing to write")
    config = DatasetConfig.model_validate(settings["dataset"])
    train, held_out = _generated(config) if config.generator else _given(config)
    with atomic_folder(out) as folder:
        _write_jsonl(folder / "train.jsonl", train)
        _write_jsonl(folder / "eval.jsonl", held_out)
        write_manifest(
            folder,
            kind="dataset",
            config=digest(settings["dataset"]),
            train_rows=len(train),
            eval_rows=len(held_out),
        )
    return f"dataset: {len(train)} training rows, {len(held_out)} held-out rows"


def _generated(config: DatasetConfig) -> tuple[list[Row], list[Row]]:
    assert config.generator is not None
    generator = load_callable(config.generator, "dataset.generator")
    try:
        result = generator(config.seed, **config.kwargs)
    except TypeError as error:
        raise ConfigError(f"dataset.kwargs: {config.generator} can't be called with them: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2 or not all(result):
        raise ConfigError(
            f"dataset.generator: {config.generator} returned {type(result).__name__}; it returns (train_rows, eval_rows), neither empty"
        )
    names = (f"{config.generator} train", f"{config.generator} eval")
    train, held_out = (
        [check_row(row, f"{name}, row {number}") for number, row in enumerate(rows, start=1)]
        for name, rows in zip(names, result, strict=True)
    )
    check_disjoint(train, held_out, names)
    return train, held_out


def _given(config: DatasetConfig) -> tuple[list[Row], list[Row]]:
    assert config.train is not None
    assert config.eval is not None
    train, held_out = read_dataset(Path(config.train).expanduser(), Path(config.eval).expanduser())
    return list(train), list(held_out)


def _write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
