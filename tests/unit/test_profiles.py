"""Profiles as `llmppo run` reads them."""

from pathlib import Path

import pytest
import yaml

from llmppo.errors import ConfigError
from llmppo.run import find_profile, profile_arguments, snakemake_command

REPOSITORY = Path(__file__).resolve().parents[2]
SNAKEFILE = REPOSITORY / "Snakefile"


def test_a_profile_is_shipped_or_a_folder(tmp_path: Path) -> None:
    assert find_profile(SNAKEFILE, "slurm") == REPOSITORY / "profiles" / "slurm" / "profile.yaml"
    (tmp_path / "config.yaml").write_text("")
    assert find_profile(SNAKEFILE, str(tmp_path)) == tmp_path / "config.yaml"
    with pytest.raises(
        ConfigError, match=r"--profile lsf: .* name one of default, kubernetes, s3, slurm, or a folder"
    ):
        find_profile(SNAKEFILE, "lsf")


def test_a_profile_becomes_arguments_without_its_logger(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    values = {
        "jobs": 3,
        "logger": "rich",
        "rerun-incomplete": True,
        "printshellcmds": False,
        "default-resources": {"nodes": 1},
        "set-resources": {"update": {"slurm_partition": "gpu"}},
    }
    profile.write_text(yaml.safe_dump(values, sort_keys=False))
    assert profile_arguments(profile) == [
        "--workflow-profile", "none", "--jobs", "3", "--rerun-incomplete", "--default-resources", "nodes=1",
        "--set-resources", "update:slurm_partition=gpu",
    ]  # fmt: skip


def test_a_missing_executor_is_named(tmp_path: Path) -> None:
    profile = tmp_path / "profile.yaml"
    profile.write_text("executor: no-such-cluster")
    with pytest.raises(ConfigError, match="snakemake-executor-plugin-no-such-cluster is not installed"):
        profile_arguments(profile)


def test_cores_are_left_to_a_profile() -> None:
    assert "--cores" in snakemake_command(SNAKEFILE)
    assert "--cores" not in snakemake_command(SNAKEFILE, None)


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_profiles_of_clusters_agree_with_the_default_one(name: str) -> None:
    """They replace it: what isn't about where jobs run must stand in each."""
    default, other = (
        yaml.safe_load((REPOSITORY / "workflow" / "profiles" / profile / "profile.yaml").read_text())
        for profile in ("default", name)
    )
    del default["logger"]
    assert default.items() <= other.items()
