"""One environment with fake stages and one finished run for all workflow tests of a session."""

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from workflow_runs import REPOSITORY, Bench, make_environment

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
