"""Disks that are full or read-only, and memory that runs out, are told in words, from whatever library met them."""

import errno
import os
import sqlite3
import stat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmppo.errors import machine_fault, memory_fault, no_room


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A device of its own like /dev/full: every write to it finds no room."""
    path = tmp_path / "full"
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 7))
    except PermissionError:
        pytest.skip("only root can make a device")
    return path


def by_python(path):
    with open(path, "w") as file:
        file.write("x" * 100_000)


def by_arrow(path):
    pq.write_table(pa.table({"a": [1]}), path)


def test_a_database_that_fills_its_disk_is_told_so(tmp_path):
    database = sqlite3.connect(tmp_path / "a.db")
    database.execute("pragma max_page_count = 2")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.executescript("create table a (b); insert into a values (randomblob(100000));")
    told = machine_fault(RuntimeError(f"(sqlite3.OperationalError) {caught.value}"), "shared/mlflow/a.json")
    assert told is not None
    assert told.startswith("shared/mlflow/a.json: No space left on device; make room")


def test_only_a_full_disk_has_no_room():
    assert no_room(OSError(errno.EDQUOT, "quota"))
    assert not no_room(OSError(errno.EROFS, "read-only"))
    assert not no_room(OSError("no number"))


@pytest.mark.parametrize("write", [by_python, by_arrow])
def test_a_full_disk_is_told_with_its_place(write, full):
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write(full)
    told = machine_fault(caught.value, "results/policy/0001")
    assert told is not None
    assert "No space left on device; make room" in told
    assert "results/policy/0001" in told or "full" in told


def test_the_words_of_rust_libraries_are_understood():
    told = machine_fault(
        Exception("Error while serializing: I/O error: Read-only file system (os error 30)"), "out"
    )
    assert told is not None
    assert told.startswith("out: Read-only file system; make it writable")


def test_other_errors_are_none_of_the_machine():
    assert machine_fault(FileNotFoundError(errno.ENOENT, "absent")) is None
    assert machine_fault(ValueError("[Errno of a different kind] 28")) is None


def test_memory_that_runs_out_names_the_knobs():
    told = memory_fault(
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "update"
    )
    assert told is not None
    assert "ppo.micro_batch_size_per_gpu" in told
    arrow = memory_fault(pa.ArrowMemoryError("malloc of size 64 failed"), "rollout")
    assert arrow is not None
    assert "rollout.hf_generate_chunk_size" in arrow
    assert memory_fault(ValueError("no"), "update") is None
