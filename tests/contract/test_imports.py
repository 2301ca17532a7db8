"""What each command loads. Start-up is paid by every job, so a library that slips in shows here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmppo.config import ExperimentConfig
from llmppo.experiment import load_experiment, variant_config
from llmppo.stage_settings import stage_settings

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = [
    *("torch", "transformers", "peft", "numpy", "pandas", "pyarrow", "scipy", "sklearn"),
    *("mlflow", "matplotlib", "snakemake", "pydantic", "yaml"),
]
TELL = f"""
import atexit, json, sys
atexit.register(lambda: print(json.dumps([name for name in {HEAVY!r} if name in sys.modules])))
"""


def loaded_by(code: str, *arguments: object) -> set[str]:
    """The heavy libraries that a Python program has loaded when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", TELL + code, *map(str, arguments)],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded(*arguments: object) -> set[str]:
    """The heavy libraries that a command has loaded when it ends."""
    return loaded_by("from llmppo.cli import main\nmain()", *arguments)


@pytest.fixture(scope="module")
def config() -> ExperimentConfig:
    return variant_config(load_experiment(REPOSITORY / "config/experiments/smollm2-compare.yaml"), "main")


def settings(config: ExperimentConfig, stage: str) -> str:
    return json.dumps(stage_settings(config, stage))


@pytest.mark.parametrize("arguments", [["--help"], ["rollout", "--help"], ["--version"]])
def test_help_loads_nothing(arguments: list[str]) -> None:
    assert loaded(*arguments) == set()


def test_checking_a_config_loads_only_the_validator() -> None:
    assert loaded("validate", "config/config.yaml") == {"pydantic", "yaml"}


def test_stages_without_a_model_load_no_model_library(config: ExperimentConfig, tmp_path: Path) -> None:
    data = tmp_path / "data"
    assert loaded("dataset", "--settings", settings(config, "dataset"), "--out", data) <= {"pydantic"}
    baselines = loaded(
        *("baselines", "--settings", settings(config, "baselines")),
        *("--dataset", data, "--out", tmp_path / "baselines.json"),
    )
    assert baselines <= {"pydantic", "numpy", "pyarrow"}
    chain = loaded("variant-config", "--settings", settings(config, "track"), "--out", tmp_path / "c.yaml")
    assert chain <= {"pydantic", "yaml"}


def test_planning_loads_no_model_library() -> None:
    code = (
        "from llmppo.experiment import load_experiment\nfrom llmppo.plan import Plan\n"
        "list(Plan(load_experiment('config/config.yaml')).targets())"
    )
    assert loaded_by(code) == {"pydantic", "yaml"}


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("base_model", set()),
        ("rollout", {"numpy", "pyarrow"}),
        ("update", {"numpy", "pyarrow"}),
        ("critic_warmup", {"numpy", "pyarrow"}),
        ("evaluate", {"numpy", "pyarrow"}),
        ("export", {"numpy"}),
        ("track", set()),
    ],
)
def test_a_stages_module_loads_model_libraries_only_when_it_runs(stage: str, expected: set[str]) -> None:
    assert loaded_by(f"import llmppo.stages.{stage}") - {"pydantic", "yaml"} <= expected
