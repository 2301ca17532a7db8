"""Atomic files and folders: whole or absent, whatever happens while they are written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmppo.errors import ArtefactError
from llmppo.files import (
    SEAL_LINE,
    atomic_folder,
    atomic_path,
    check_manifest,
    digest,
    read_json,
    read_sealed_text,
    write_json,
    write_manifest,
    write_sealed,
    write_sealed_text,
)


def test_a_failure_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})

    def interrupted() -> None:
        with atomic_path(tmp_path / "a.json") as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert read_json(tmp_path / "a.json") == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_replaces_its_predecessor_whole(tmp_path: Path) -> None:
    for content in ("old", "new"):
        with atomic_folder(tmp_path / "policy") as folder:
            (folder / f"{content}.txt").write_text(content)
            write_manifest(folder, kind="test")
    assert sorted(path.name for path in (tmp_path / "policy").iterdir()) == ["manifest.json", "new.txt"]


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\nfrom llmppo.files import atomic_folder\n"
            "with atomic_folder(sys.argv[1]) as folder:\n"
            "    (folder / 'half').write_text('x')\n"
            "    os.kill(os.getpid(), 9)",
            str(tmp_path / "policy"),
        ],
        check=False,
    )
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    number = left.name.rpartition("-")[2]
    running = tmp_path / left.name.replace(number, str(os.getppid()))  # another writer that lives
    elsewhere = tmp_path / left.name.replace(os.uname().nodename, "other-node")  # one that may live
    running.mkdir()
    elsewhere.mkdir()
    with atomic_folder(tmp_path / "policy") as folder:
        write_manifest(folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [running.name, elsewhere.name, "policy"]
    )


def test_damage_is_named(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1234")
    write_manifest(tmp_path)
    check_manifest(tmp_path)
    (tmp_path / "weights").write_bytes(b"1235")
    with pytest.raises(ArtefactError, match="weights differs from its manifest"):
        check_manifest(tmp_path)
    (tmp_path / "weights").unlink()
    with pytest.raises(ArtefactError, match="weights is missing"):
        check_manifest(tmp_path)


def test_json_that_is_cut_off_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"a": ')
    with pytest.raises(ArtefactError, match=r"m\.json is not valid JSON"):
        read_json(tmp_path / "m.json")
    with pytest.raises(ArtefactError, match="does not exist"):
        read_json(tmp_path / "absent.json")


def test_a_digest_ignores_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize("edit", [('"a": 1', '"a": 3'), ('"b"', '"d"'), ('"sha256": "', '"sha256": "0')])
def test_a_sealed_file_knows_of_every_change(tmp_path: Path, edit: tuple[str, str]) -> None:
    file = tmp_path / "m.json"
    write_sealed(file, {"b": [0.1, None], "a": 1, 7: "seven"})
    assert read_json(file) == {"b": [0.1, None], "a": 1, "7": "seven"}
    file.write_text(file.read_text().replace(*edit))
    with pytest.raises(ArtefactError, match=r"m\.json differs from its checksum"):
        read_json(file)


@pytest.mark.parametrize(
    "edit", [("rate: 1", "rate: 2"), ("#", "##"), (": 1\n", ": 1\n\n"), (SEAL_LINE, "# "), ("rate: 1\n", "")]
)
def test_a_sealed_text_knows_of_every_change(tmp_path: Path, edit: tuple[str, str]) -> None:
    file = tmp_path / "config.yaml"
    write_sealed_text(file, "name: ünïcode\nrate: 1\n")
    assert read_sealed_text(file) == "name: ünïcode\nrate: 1\n"
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == {"name": "ünïcode", "rate": 1}
    file.write_text(file.read_text(encoding="utf-8").replace(*edit), encoding="utf-8")
    with pytest.raises(ArtefactError, match=r"config\.yaml differs from its checksum"):
        read_sealed_text(file)


def test_files_that_are_skipped_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"w")
    write_manifest(tmp_path)
    (tmp_path / "weights").write_bytes(b"v")
    check_manifest(tmp_path, skip=lambda name: name == "weights")
    with pytest.raises(ArtefactError, match="weights differs"):
        check_manifest(tmp_path)
