"""The `llmppo` command: cheap to start, clear in its errors, whole in its logs."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmppo import cli
from llmppo.errors import ConfigError
from llmppo.experiment import parse_experiment
from llmppo.plan import STAGES, stage_settings
from llmppo.process import PARENT
from llmppo.run import change, refuse_configs
from llmppo.stage_command import read_settings

REPOSITORY = Path(__file__).resolve().parents[2]
EXPERIMENT = REPOSITORY / "config" / "test" / "tiny.yaml"
LLMPPO = [sys.executable, "-m", "llmppo.cli"]
# What pays for a stage's start; `llmppo --help` and a refused option must load none of it.
HEAVY = (
    "torch",
    "transformers",
    "peft",
    "pandas",
    "pyarrow",
    "mlflow",
    "numpy",
    "snakemake",
    "pydantic",
    "rich",
)


def stage_program(tmp_path: Path, body: str) -> list[str]:
    """A program that is `llmppo` with one fake stage, `update`."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys, types\n"
        "from llmppo import cli\n"
        "from llmppo.errors import ArtefactError\n"
        "def run(settings, **options):\n"
        f"    {body}\n"
        "module = types.ModuleType('llmppo.stages.update')\n"
        "module.run = run\n"
        "sys.modules['llmppo.stages.update'] = module\n"
        "cli.main()\n"
    )
    return [sys.executable, str(program)]


UPDATE = [
    "update", "--settings", '{"threads": 3}', "--base", "b", "--policy", "p", "--seed", "1", "--iteration", "2",
    "--out", "o", "--advantages", "a", "--metrics", "m", "r0", "r1",
]  # fmt: skip


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, **more)


def test_help_is_instant_and_loads_nothing_heavy() -> None:
    watch = f"import sys; from llmppo import cli; print(sorted(set(sys.modules) & set({HEAVY})))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run([sys.executable, "-c", watch])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.strip() == "[]"
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_help_of_every_command_explains_itself() -> None:
    runner = CliRunner()
    listing = runner.invoke(cli.main, ["--help"]).output
    for name, command in cli.main.commands.items():
        assert name in listing
        text = runner.invoke(cli.main, [name, "--help"])
        assert text.exit_code == 0
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        assert all(option.help or option.hidden for option in options), name


def test_every_stage_of_the_plan_is_a_command() -> None:
    assert {stage.replace("_", "-") for stage in STAGES} <= set(cli.main.commands)


def test_a_stage_gets_its_options_as_keywords(tmp_path: Path) -> None:
    body = (
        "print({k: str(v) if not isinstance(v, tuple) else [str(x) for x in v] for k, v in options.items()})"
    )
    done = run([*stage_program(tmp_path, body), *UPDATE])
    assert done.returncode == 0, done.stderr
    assert "'rollouts': ['r0', 'r1']" in done.stdout
    assert "'evaluation': 'None'" in done.stdout


def test_threads_are_set_before_the_stage_is_imported(tmp_path: Path) -> None:
    names = "['OMP_NUM_THREADS', 'MKL_NUM_THREADS', 'OMP_WAIT_POLICY', 'TOKENIZERS_PARALLELISM']"
    done = run([*stage_program(tmp_path, f"print([os.environ[name] for name in {names}])"), *UPDATE])
    assert done.stdout.strip() == "['3', '3', 'PASSIVE', 'false']"


def test_the_log_gets_all_output_and_the_terminal_one_line(tmp_path: Path) -> None:
    body = "print('python'); os.system('echo child; echo trouble >&2'); return 'all done'"
    log = tmp_path / "logs" / "update.log"
    done = run([*stage_program(tmp_path, body), *UPDATE, "--log", str(log)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "all done\n")
    assert log.read_text().splitlines() == ["python", "child", "trouble", "all done"]


def test_an_error_of_the_user_is_one_message_in_both(tmp_path: Path) -> None:
    log = tmp_path / "update.log"
    body = "raise ArtefactError('x.parquet is damaged; delete it')"
    done = run([*stage_program(tmp_path, body), *UPDATE, "--log", str(log)])
    expected = "llmppo update: error: x.parquet is damaged; delete it\n"
    assert (done.returncode, done.stderr, log.read_text()) == (1, expected, expected)


def test_an_unexpected_error_leaves_its_trace_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "update.log"
    done = run([*stage_program(tmp_path, "return 1 / 0"), *UPDATE, "--log", str(log)])
    assert done.returncode == 1
    assert done.stderr == f"llmppo update: ZeroDivisionError: division by zero (traceback in {log})\n"
    assert "Traceback (most recent call last)" in log.read_text()


def test_a_stage_dies_with_the_process_that_the_rule_names(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    body = f"import time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    command = " ".join(f"'{part}'" for part in [*stage_program(tmp_path, body), *UPDATE])
    # As Snakemake does: bash, child of the workflow, is replaced by the stage.
    inner = f"import subprocess; subprocess.run(['bash', '-c', {f'{PARENT}=$PPID exec {command}'!r}])"
    workflow = subprocess.Popen([sys.executable, "-c", inner])
    deadline = time.monotonic() + 30
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workflow.kill()
    workflow.wait()
    stage = Path(f"/proc/{marker.read_text()}/stat")
    while stage.exists() and stage.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the stage outlived its workflow"
        time.sleep(0.05)


def test_a_stage_whose_workflow_is_gone_does_not_start(tmp_path: Path) -> None:
    done = run([*stage_program(tmp_path, "print('started')"), *UPDATE], env={**os.environ, PARENT: "1"})
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_settings_come_from_json_or_from_an_experiment_file() -> None:
    assert read_settings('{"a": 1}', "update", None) == {"a": 1}
    experiment = parse_experiment({"name": "x", "base_model": {"kind": "tiny"}})
    assert set(read_settings(str(EXPERIMENT), "update", "main")) == set(stage_settings(experiment, "update"))
    with pytest.raises(ConfigError, match="no variant `other`; there are: main"):
        read_settings(str(EXPERIMENT), "update", "other")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_settings("{broken", "update", None)


def test_validate_says_what_would_run_or_what_is_wrong(tmp_path: Path) -> None:
    runner = CliRunner()
    good = runner.invoke(cli.main, ["validate", str(EXPERIMENT)])
    assert "is valid. tiny: 1 variant x 2 seeds, 3 iterations of 8 episodes" in good.output
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: x\nbase_model: {kind: tiny}\nppo: {gama: 1}\n")
    bad = runner.invoke(cli.main, ["validate", str(wrong)])
    assert bad.exit_code == 1
    assert "llmppo validate: error:" in bad.output
    assert "ppo.gama: unknown key; did you mean `gamma`?" in bad.output


def test_validate_warns_of_variants_that_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "same.yaml"
    file.write_text("name: x\nbase_model: {kind: tiny}\nvariants: {a: {}, b: {}}\n")
    told = CliRunner().invoke(cli.main, ["validate", str(file)])
    assert told.exit_code == 0
    assert "warning: variants.b: its settings are those of variant `a`" in told.stderr
    assert "is valid" in told.stdout


def test_schema_is_printed_or_written(tmp_path: Path) -> None:
    runner = CliRunner()
    assert json.loads(runner.invoke(cli.main, ["schema"]).output)["title"] == "ExperimentConfig"
    out = tmp_path / "schema.json"
    runner.invoke(cli.main, ["schema", "--out", str(out)])
    assert json.loads(out.read_text())["title"] == "ExperimentConfig"


def test_the_user_interface_needs_results(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.main, ["ui", "--config", str(EXPERIMENT), "--results", str(tmp_path)])
    assert result.exit_code == 1
    assert "`llmppo run` writes it" in result.output


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("ppo.clip_coef=0.1", {"a": 1, "ppo": {"gamma": 1, "clip_coef": 0.1}}),
        ("ppo={gamma: 0.5}", {"a": 1, "ppo": {"gamma": 0.5}}),
        ("seeds=[0, 1]", {"a": 1, "ppo": {"gamma": 1}, "seeds": [0, 1]}),
        ("env.kwargs.text=a=b", {"a": 1, "ppo": {"gamma": 1}, "env": {"kwargs": {"text": "a=b"}}}),
        ("a=null", {"a": None, "ppo": {"gamma": 1}}),
        ("ppo={}", {"a": 1, "ppo": {}}),
        ("env.kwargs={}", {"a": 1, "ppo": {"gamma": 1}}),
    ],
)
def test_set_changes_one_key(setting: str, expected: dict[str, Any]) -> None:
    assert change({"a": 1, "ppo": {"gamma": 1}}, setting) == expected


@pytest.mark.parametrize("setting", ["ppo.clip_coef", "=3", "a=[1"])
def test_a_malformed_set_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        change({}, setting)


def test_a_config_given_as_a_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_configs(["-n", "results/a/main/seed-0/config.yaml", "--configfile", "any.yaml"], "results")
    monkeypatch.chdir(REPOSITORY)
    for command in (["mine.yaml"], ["-n", str(EXPERIMENT)]):
        result = CliRunner().invoke(cli.main, ["run", "--results", str(tmp_path), *command])
        assert result.exit_code == 1
        assert f"a config is given as --config {command[-1]}" in result.output
