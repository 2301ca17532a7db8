"""Policy folders: pointers of stopped chains are followed, damage is named."""

from pathlib import Path

import pytest

from llmppo.errors import ArtefactError
from llmppo.files import write_json, write_manifest
from llmppo.policies import prune, resolve_policy, stopped_target


def real(root: Path, name: str) -> Path:
    folder = root / name
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "adapter_model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.safetensors").write_bytes(b"moments")
    write_manifest(folder, kind="policy", iteration=int(name))
    return folder


def stopped(root: Path, name: str, target: str) -> Path:
    write_json(root / name / "manifest.json", {"kind": "stopped", "target": target, "files": {}})
    return root / name


def test_a_real_policy_resolves_to_itself(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    assert stopped_target(folder) is None
    assert resolve_policy(folder) == folder


def test_pointers_are_followed_to_the_last_real_policy(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    stopped(tmp_path, "0008", "0007")
    assert resolve_policy(stopped(tmp_path, "0009", "0008")) == folder


def test_pruned_optimizer_state_is_no_damage(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    (folder / "optimizer.safetensors").unlink()
    assert resolve_policy(folder) == folder


def test_damage_behind_a_pointer_is_named(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    (folder / "actor" / "adapter_model.safetensors").write_bytes(b"waights")
    with pytest.raises(ArtefactError, match=r"0007/actor/adapter_model.safetensors"):
        resolve_policy(stopped(tmp_path, "0008", "0007"))


@pytest.mark.parametrize("target", ["../0007", "", "..", "a/b"])
def test_a_pointer_leaves_its_folder_never(tmp_path: Path, target: str) -> None:
    real(tmp_path, "0007")
    with pytest.raises(ArtefactError, match="target"):
        resolve_policy(stopped(tmp_path, "0008", target))


def test_a_circle_of_pointers_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path, "0007", "0008")
    with pytest.raises(ArtefactError, match="points back"):
        resolve_policy(stopped(tmp_path, "0008", "0007"))


def test_pruning_the_optimizer_keeps_the_policy_usable(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    prune(folder, "optimizer")
    assert not (folder / "optimizer.safetensors").exists()
    assert resolve_policy(folder) == folder


def test_a_policy_without_weights_says_that_it_was_pruned(tmp_path: Path) -> None:
    folder = real(tmp_path, "0007")
    prune(folder, "weights")
    assert (folder / "manifest.json").exists()
    with pytest.raises(ArtefactError, match="0007 was pruned"):
        resolve_policy(folder)


def test_pruning_leaves_pointers_and_absent_policies_alone(tmp_path: Path) -> None:
    pointer = stopped(tmp_path, "0008", "0007")
    prune(pointer, "weights")
    prune(tmp_path / "0001", "weights")
    assert (pointer / "manifest.json").exists()
