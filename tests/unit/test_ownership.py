"""A results folder belongs to one run at a time, and to the directory that knows how it was made."""

import os
import shutil
import time
from pathlib import Path

import pytest

from llmppo.errors import LlmppoError
from llmppo.files import read_json
from llmppo.ownership import HELD, check_home, hold, hold_for_good, in_use, near, settle


def test_a_path_has_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {near(path) for path in ("results", "./results/", str(tmp_path / "results"), "a/../results")} == {
        "results"
    }
    assert near("../elsewhere") == str(tmp_path.parent / "elsewhere")


def test_results_are_not_continued_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    check_home("results")
    settle("results")
    check_home("results")
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(LlmppoError, match=r"was made from .*/a"):
        check_home(str(tmp_path / "a" / "results"))


def test_copied_and_moved_results_are_refused_in_their_own_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settle("results")
    shutil.copytree("results", "copy")
    with pytest.raises(LlmppoError, match=r"copy is a copy of results, or was moved from there.*adopt"):
        check_home("copy")
    settle("copy")  # as `llmppo adopt` does
    check_home("copy")
    check_home("results")


def test_results_whose_notes_are_gone_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settle("results")
    shutil.rmtree(".snakemake")
    with pytest.raises(LlmppoError, match=r"a .snakemake folder that is gone from .*adopt"):
        check_home("results")


def test_a_second_holder_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lock = tmp_path / "results" / ".run.lock"
    with hold(lock) as descriptor:
        assert descriptor is not None
        with pytest.raises(LlmppoError, match=f"process {os.getpid()} on"):
            hold_for_good(str(lock), str(lock.parent))
        assert f"in use by process {os.getpid()} on" in str(in_use(str(lock.parent), str(lock)))
        monkeypatch.setenv(HELD, str(lock))  # a child of the holder
        assert hold_for_good(str(lock), str(lock.parent)) is None
        assert in_use(str(lock.parent), str(lock)) is None
    monkeypatch.delenv(HELD)
    assert in_use(str(lock.parent), str(lock)) is None
    assert in_use("nowhere", "nowhere/.run.lock") is None
    kept = hold_for_good(str(lock), str(lock.parent))
    assert kept is not None
    assert read_json(lock.parent / ".home.json") == {
        "directory": os.getcwd(),
        "results": near(str(lock.parent)),
    }
    kept.close()


def test_files_from_the_future_get_this_moments_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Snakemake throws away whatever is made of them, until the clock has caught up."""
    now = time.time()
    for name, age in (("old", 1000), ("future", -1000)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (now - age, now - age))
    monkeypatch.chdir(tmp_path)
    settle(str(tmp_path))
    assert (tmp_path / "old").stat().st_mtime == pytest.approx(now - 1000, abs=1)
    assert now <= (tmp_path / "future").stat().st_mtime <= time.time()
