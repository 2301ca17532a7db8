"""Where the rows of a dataset come from: a JSONL file, a Parquet file, or a folder of `datasets.save_to_disk`.

Each reader yields (where, row): `where` names file and line or row, for messages; the row isn't checked.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmppo.errors import ConfigError, reading

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = "a JSONL file, a Parquet file (*.parquet), or a folder written by datasets.save_to_disk"


def read_file(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Rows of `path` in their order. Raises ConfigError naming what can't be read."""
    path = Path(path)
    try:
        if path.is_dir() or path.suffix == ".parquet":
            with reading(path, ConfigError, f"a dataset is {FORMATS}"):
                rows = _table(path).to_pylist()
            for number, row in enumerate(rows, start=1):
                yield f"{path}, row {number}", row
        else:
            yield from _json_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset file {path} can't be read: {error}") from None


def _table(path: Path) -> "pa.Table":
    import pyarrow.parquet as pq  # not above: most datasets are JSONL

    return _saved_dataset(path) if path.is_dir() else pq.read_table(path)


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _saved_dataset(folder: Path) -> "pa.Table":
    """The table of a saved dataset: Arrow stream files, named in their order by `state.json`."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        raise ConfigError(
            f"dataset folder {folder} holds several splits; name one: "
            + ", ".join(str(folder / split) for split in splits)
        )
    if not (folder / "state.json").is_file():
        raise ConfigError(f"dataset folder {folder} has no state.json; a dataset is {FORMATS}")
    import pyarrow as pa

    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    tables = []
    for entry in state["_data_files"]:
        with pa.memory_map(str(folder / entry["filename"])) as source:
            tables.append(pa.ipc.open_stream(source).read_all())
    return pa.concat_tables(tables)
