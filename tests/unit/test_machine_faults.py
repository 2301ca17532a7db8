"""Disks that are full or read-only are told in words, from whatever library met them."""

import errno
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmppo.errors import machine_fault

FULL = Path("/dev/full")  # every write to it finds no room

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


def by_python():
    with open(FULL, "w") as file:
        file.write("x" * 100_000)


def by_arrow():
    pq.write_table(pa.table({"a": [1]}), "/dev/full")


@pytest.mark.parametrize("write", [by_python, by_arrow])
def test_a_full_disk_is_told_with_its_place(write):
    with pytest.raises(OSError) as caught:  # noqa: PT011
        write()
    told = machine_fault(caught.value, "results/policy/0001")
    assert told is not None
    assert "No space left on device; make room" in told
    assert "results/policy/0001" in told or "/dev/full" in told


def test_the_words_of_rust_libraries_are_understood():
    told = machine_fault(
        Exception("Error while serializing: I/O error: Read-only file system (os error 30)"), "out"
    )
    assert told is not None
    assert told.startswith("out: Read-only file system; make it writable")


def test_other_errors_are_none_of_the_machine():
    assert machine_fault(FileNotFoundError(errno.ENOENT, "absent")) is None
    assert machine_fault(ValueError("[Errno of a different kind] 28")) is None
