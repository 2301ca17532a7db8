"""What all workflow tests of a session share: an environment with fake stages and a finished run with them, and finished
runs of the real stages.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from workflow_runs import FASTER, REPOSITORY, SMOKE, Bench, llmppo_run, make_environment

CONFIG = yaml.safe_load((REPOSITORY / "config" / "test" / "tiny.yaml").read_text())


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment whose `llmppo` command has fake stages."""
    return make_environment(tmp_path_factory.mktemp("environment"))


@pytest.fixture
def bench(tmp_path: Path, fake_python: Path) -> Bench:
    """An empty working directory with the tiny config."""
    fresh = Bench(tmp_path, fake_python, CONFIG)
    fresh.write_config()
    return fresh


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, fake_python: Path) -> Bench:
    """The tiny experiment, run to its end once. Tests change the config and plan, but run nothing."""
    done = Bench(tmp_path_factory.mktemp("finished"), fake_python, CONFIG)
    done.write_config()
    done.run()
    return done


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on two cores."""
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(SMOKE, folder)
    child = llmppo_run(folder, cores=2)
    output, _ = child.communicate()
    assert child.returncode == 0, output
    assert "main seed 0: iteration 3/3, reward " in output
    assert "update in process" in (folder / "results/smoke/logs/worker.log").read_text()
    return folder / "results"


@pytest.fixture(scope="session")
def replayed(undisturbed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run with two replays: one with nothing changed, one with larger learning rates."""
    folder = tmp_path_factory.mktemp("replayed")
    shutil.copytree(undisturbed, folder / "results", ignore=shutil.ignore_patterns(".home.json"))
    shutil.copytree(undisturbed.parent / ".snakemake", folder / ".snakemake")
    for options in (("--set", "ppo.gamma=1.0", "--name", "same"), FASTER):
        ran = subprocess.run(
            [
                str(Path(sys.executable).with_name("llmppo")), "replay", "results/smoke", "--cores", "2", *options,
            ],
            cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout + ran.stderr
    (folder / "told.txt").write_text(ran.stdout)
    return folder
