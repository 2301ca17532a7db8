"""What each command loads. Start-up is paid by every job, so a library that slips in shows here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmppo.cli import main
from llmppo.config import ExperimentConfig
from llmppo.experiment import load_experiment, variant_config
from llmppo.stage_settings import stage_settings
from llmppo.testing.results import game_config, write_results

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
    # and the game that the config names, which draws with numpy
    assert loaded("validate", "config/config.yaml") == {"pydantic", "yaml", "numpy"}


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


# What the module of each stage loads, before it runs.
OF_A_MODULE = {
    "base_model": {"pydantic"},
    "dataset": {"pydantic"},
    "baselines": {"pydantic", "numpy"},
    "rollout": {"pydantic", "numpy", "pyarrow"},
    "critic_warmup": {"pydantic", "numpy", "pyarrow"},
    "update": {"pydantic", "numpy", "pyarrow"},
    "iterations": {"pydantic", "numpy", "pyarrow"},
    "evaluate": {"pydantic", "numpy", "pyarrow"},
    "export": {"pydantic", "numpy", "yaml"},
    "variant_config": {"yaml"},
    "mlflow_init": set(),
    "track": set(),
    "report": {"pydantic", "numpy", "yaml"},
}
NO_STAGES = {"run", "replay", "ui", "status", "verify", "adopt", "show", "validate", "schema"}


def test_every_stage_is_in_the_table() -> None:
    assert {command.replace("-", "_") for command in main.commands.keys() - NO_STAGES} == OF_A_MODULE.keys()


@pytest.mark.parametrize("stage", OF_A_MODULE)
def test_a_stages_module_loads_what_it_must(stage: str) -> None:
    assert loaded_by(f"import llmppo.stages.{stage}") == OF_A_MODULE[stage]


def test_report_and_tracker_load_no_model_library(tmp_path: Path) -> None:
    config, folder, baselines = write_results(
        tmp_path, game_config(seeds=[0], iterations=2, evaluation={"every": 2, "episodes": 4})
    )
    report = loaded(
        *("report", "--settings", json.dumps(stage_settings(config, "report")), "--results", folder),
        *("--baselines", baselines, "--out", folder / "report" / "report.html"),
    )
    # Arrow imports pandas when it hands out the texts of episodes.
    assert report == {"pydantic", "numpy", "yaml", "matplotlib", "pyarrow", "pandas"}
    tracked = loaded(
        *("track", "--settings", settings(variant_config(config, "main"), "track"), "--experiment", "game"),
        *("--variant", "main", "--seed", 0, "--run-dir", folder / "main" / "seed-0"),
        *("--uri", f"sqlite:///{tmp_path}/mlflow.db", "--out", tmp_path / "tracking.json"),
    )
    assert "mlflow" in tracked
    assert not tracked & {"torch", "transformers", "peft", "sklearn", "matplotlib"}


def test_the_worker_has_what_its_stages_will_import() -> None:
    held = loaded_by("from llmppo.worker.server import import_libraries\nimport_libraries()")
    assert held >= {"torch", "transformers", "peft", "numpy", "pyarrow", "pandas", "pydantic", "yaml"}
    assert not held & {"sklearn", "matplotlib", "mlflow", "snakemake"}
