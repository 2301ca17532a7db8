"""How the workflow is called: config files, results folders, modules, messages. Dry runs only."""

import re
import subprocess
import textwrap

import pytest
import yaml
from workflow_runs import REPOSITORY, Bench

pytestmark = pytest.mark.workflow


def plain(bench: Bench, *arguments: str) -> str:
    """A dry run without `--configfile`."""
    command = bench.command("-n", "--workflow-profile", "none", *arguments)
    at = command.index("--configfile")
    del command[at : at + 2]
    return run(bench, command)


def run(bench: Bench, command: list[str], status: int = 0) -> str:
    done = subprocess.run(command, cwd=bench.folder, env=bench.env(), capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def with_default(bench: Bench) -> Bench:
    """A bench whose config/config.yaml is another experiment with a key that must not leak."""
    default = {**bench.config, "name": "default", "variants": {"leaked": {}}, "stop_at": {"value": 0.5}}
    (bench.folder / "config").mkdir()
    (bench.folder / "config" / "config.yaml").write_text(yaml.safe_dump(default))
    return bench


def test_the_default_config_is_found(with_default: Bench) -> None:
    assert "results/default/leaked/seed-0/config.yaml" in plain(with_default)


def test_a_results_folder_from_the_command_line(with_default: Bench) -> None:
    output = plain(with_default, "--config", "results=else where")
    assert "else where/default/leaked/seed-0/config.yaml" in output


def test_a_config_file_replaces_the_default_one(with_default: Bench) -> None:
    output = run(with_default, with_default.command("-n", "--workflow-profile", "none"))
    assert "results/tiny/main/seed-0/config.yaml" in output
    assert "leaked" not in output


def test_the_default_profile_is_picked_up(bench: Bench) -> None:
    output = run(bench, bench.command("-n"))
    assert "profiles/default" in output
    assert "warmup rollout" in output  # the rich logger's table of jobs


def test_a_wrong_config_is_one_message(bench: Bench) -> None:
    bench.write_config(ppo={"lr_acto": 1.0, "batch_size": 0})
    output = run(bench, bench.command("-n"), status=1)
    assert "ppo.lr_acto: unknown key; did you mean `lr_actor`?" in output
    assert "ppo.batch_size: Input should be greater than or equal to 1 (got 0)" in output
    assert str(bench.config_file) in output
    assert "File " not in output
    assert "Traceback" not in output


def test_an_early_stop_waits_for_the_evaluation_before(bench: Bench) -> None:
    bench.write_config(seeds=[0], iterations=4, stop_at={"value": 0.9})
    output = run(bench, bench.command("-n", "--workflow-profile", "none", "--printshellcmds"))
    updates = [line for line in output.splitlines() if "llmppo update" in line]
    stops = {line.split("--iteration ")[1].split()[0]: "--evaluation" in line for line in updates}
    assert stops == {
        "0001": True,
        "0002": False,
        "0003": True,
        "0004": False,
    }  # policies 0 and 2 are evaluated


@pytest.mark.parametrize("prefix", ["", 'prefix: "nested"'])
def test_the_workflow_is_usable_as_a_module(bench: Bench, prefix: str) -> None:
    (bench.folder / "Snakefile").write_text(
        textwrap.dedent(
            f"""
            configfile: "{bench.config_file}"

            module ppo:
                snakefile: "{REPOSITORY}/Snakefile"
                config: config
                {prefix}

            use rule * from ppo as ppo_*

            rule all:
                default_target: True
                input: rules.ppo_all.input
            """
        )
    )
    command = [str(bench.python), "-m", "snakemake", "--workflow-profile", "none"]
    output = run(bench, [*command, "-n", "--printshellcmds"])
    assert "rule ppo_update:" in output
    if prefix:
        assert "--out nested/results/tiny/main/seed-0/policy/0001" in output
    run(bench, [*command, "--cores", "2"])
    report = bench.folder / ("nested/" if prefix else "") / "results/tiny/report/report.html"
    assert report.is_file()


def test_a_dry_run_of_llmppo_run_plans_and_leaves_nothing(bench: Bench) -> None:
    command = [str(bench.python.with_name("llmppo")), "run", "--config", str(bench.config_file)]
    output = run(bench, [*command, "-n", "--set", "iterations=5", "--workflow-profile", "none"])
    assert "iteration=0005" in output
    assert not bench.results.exists()


def test_a_results_folder_that_cannot_be_written_is_named(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    command = [str(bench.python.with_name("llmppo")), "run", "--config", str(bench.config_file)]
    output = run(bench, [*command, "--results", "file/below"], status=1)
    assert "llmppo run: error: file/below can't be written" in output
    assert "Traceback" not in output


def test_a_user_module_reruns_what_calls_it_when_its_code_changes(bench: Bench) -> None:
    module = bench.folder / "my_game.py"
    module.write_text('"""My game."""\n\n\nclass Game:\n    reward = 1\n')
    bench.write_config(seeds=[0], iterations=1, env={"factory": "my_game:Game"})
    bench.run()
    module.write_text("# a comment\nclass Game:\n    '''Documented.'''\n\n    reward = 1\n")
    assert bench.planned() == set()
    module.write_text("class Game:\n    reward = 2\n")
    rules = {job.split()[0] for job in bench.planned()}
    assert {"rollout", "warmup_rollout", "evaluate", "baselines"} <= rules
    assert "base_model" not in rules


def test_the_stages_that_call_user_modules_are_told_what_the_plan_saw(bench: Bench) -> None:
    (bench.folder / "my_game.py").write_text("class Game: ...\n")
    told = {"rollout", "evaluate", "baselines", "iterations"}
    for size in (1, 3):
        bench.write_config(env={"factory": "my_game:Game"}, iterations=4, iterations_per_job=size)
        output = bench.snakemake("-n", "-p", "--workflow-profile", "none").stdout
        commands = re.findall(r"exec llmppo ([\w-]+) .*", output)
        with_code = re.findall(r"exec llmppo ([\w-]+) .* --code [0-9a-f]{12}-[0-9a-f]{12} ", output)
        assert {name: commands.count(name) for name in told} == {name: with_code.count(name) for name in told}
        assert with_code.count("iterations" if size == 3 else "rollout")
