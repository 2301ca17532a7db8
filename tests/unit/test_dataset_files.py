"""Formats of dataset files; `tests/data/saved-dataset` was written by `datasets.DatasetDict.save_to_disk`."""

import datetime
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmppo.envs.dataset_env import DatasetEnv
from llmppo.envs.dataset_rows import read_rows
from llmppo.errors import ConfigError
from llmppo.stages import dataset

SAVED = Path(__file__).resolve().parents[1] / "data" / "saved-dataset"
ROWS = [{"question": "2+2?", "answer": "4", "level": 1}, {"question": "3+3?", "answer": "6", "level": 1}]


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_gives_the_rows_of_the_same_jsonl(tmp_path):
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_rows(parquet(tmp_path / "rows.parquet", ROWS)) == read_rows(lines) == tuple(ROWS)


def test_a_saved_dataset_gives_the_rows_of_all_its_shards_in_order():
    # Its two rows were turned round before they were saved, each in a shard of its own.
    assert read_rows(SAVED / "train") == tuple(ROWS[::-1])
    assert read_rows(SAVED / "test") == ({"question": "Capital of France?", "answer": "Paris", "level": 2},)


def test_the_environment_and_the_stage_take_a_saved_dataset(tmp_path):
    env = DatasetEnv(SAVED / "train", SAVED / "test")
    assert (env.dataset_size, len(env.eval_rows)) == (2, 1)
    section = {"train": str(SAVED / "train"), "eval": str(SAVED / "test")}
    assert dataset.run({"dataset": section}, out=tmp_path / "out").endswith(
        "2 training rows, 1 held-out rows"
    )
    assert json.loads((tmp_path / "out/eval.jsonl").read_text())["level"] == 2


def test_a_folder_that_is_written_again_is_read_again(tmp_path):
    folder = shutil.copytree(SAVED, tmp_path / "saved")
    held_out = parquet(tmp_path / "eval.parquet", [{"question": "x", "answer": "y"}])
    assert DatasetEnv(folder / "train", held_out).dataset_size == 2
    state = json.loads((folder / "train/state.json").read_text())
    (folder / "train/state.json").write_text(json.dumps({**state, "_data_files": state["_data_files"][:1]}))
    assert DatasetEnv(folder / "train", held_out).dataset_size == 1


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"saved-dataset holds several splits; name one: .*train, .*test"):
        read_rows(SAVED)
    with pytest.raises(ConfigError, match=r"has no state.json; a dataset is a JSONL file, a Parquet file"):
        read_rows(tmp_path)
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"broken.parquet can't be read: "):
        read_rows(broken)
    with pytest.raises(ConfigError, match=r"nowhere.parquet can't be read: No such file"):
        DatasetEnv(tmp_path / "nowhere.parquet", broken)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"question": "a?", "label": "b"}, "row 1: no field `answer`; the row has: question, label"),
        (
            {"question": "a?", "answer": "b", "day": datetime.date(2026, 1, 2)},
            "row 1: `day` can't be stored as JSON",
        ),
        ({"question": "a?", "answer": float("nan")}, "row 1: `answer` can't be stored as JSON"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, fault):
    path = parquet(tmp_path / "rows.parquet", [row])
    with pytest.raises(ConfigError) as error:
        read_rows(path)
    assert f"{path}, {fault}" in str(error.value)


def test_shared_questions_are_refused_by_content_and_named_up_to_five(tmp_path):
    train = parquet(tmp_path / "train.parquet", [{"question": f"Q {n}", "answer": "a"} for n in range(9)])
    held_out = parquet(
        tmp_path / "eval.parquet",
        [{"question": "new", "answer": "a"}, *({"question": f" q  {n}", "answer": "b"} for n in range(7))],
    )
    with pytest.raises(ConfigError) as error:
        DatasetEnv(train, held_out)
    message = str(error.value)
    for number in range(5):
        assert f"eval.parquet, row {number + 2} asks what {train}, row {number + 1} asks" in message
    assert "row 7 asks" not in message
    assert "7 of 8 held-out rows are in training too" in message
