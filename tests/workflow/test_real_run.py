"""The whole pipeline with its real stages: killed in the middle and resumed, it ends with the same bytes.

The undisturbed run forks its stages from a worker; the resumed one starts them cold.
"""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from workflow_runs import REPOSITORY

pytestmark = [pytest.mark.workflow, pytest.mark.slow]

# Pages, cards and the tracker show times; the rest may not depend on when or where a stage ran.
TIMED_FOLDERS = ("logs", "benchmarks", "report", "mlartifacts")
TIMED_FILES = ("mlflow.db", "tracking.json", ".run.lock", ".home.json", "README.md")
SMOKE = REPOSITORY / "config" / "test" / "smoke.yaml"  # three iterations


def llmppo_run(folder: Path, cores: int, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            str(Path(sys.executable).with_name("llmppo")), "run", "--config", "smoke.yaml",
            "--cores", str(cores), *options,
        ],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def without_times(path: Path) -> Any:
    """A metrics file less its clock readings and what the machine gave."""
    content = json.loads(path.read_text())
    content.pop("finished_at")
    for metrics in (content.get("metrics", {}), *content.get("steps", [])):
        for name in [name for name in metrics if name.startswith(("time/", "perf/"))]:
            del metrics[name]
    return content


def result_hashes(results: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(results.rglob("*")):
        name = path.relative_to(results)
        if not path.is_file() or path.name in TIMED_FILES or set(name.parts) & set(TIMED_FOLDERS):
            continue
        if path.name == "metrics.json":
            content = json.dumps(without_times(path), sort_keys=True).encode()
        elif name.parts[-2:] == ("export", "manifest.json"):  # lists the card's hash
            content = json.dumps(sorted(json.loads(path.read_text())["files"])).encode()
        else:
            content = path.read_bytes()
        hashes[str(name)] = hashlib.sha256(content).hexdigest()
    return hashes


@pytest.fixture(scope="module")
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


def test_every_artefact_is_there(undisturbed: Path) -> None:
    chain = undisturbed / "smoke" / "main" / "seed-0"
    for name in (
        "config.yaml",
        "policy/0000/manifest.json",
        "policy/0003/optimizer.safetensors",
        "iterations/0002/rollouts/shard-1.parquet",
        "iterations/0002/advantages.parquet",
        "evaluations/0000/sampled.parquet",
        "evaluations/0003/greedy.parquet",
        "export/adapter/adapter_model.safetensors",
        "export/merged/model.safetensors",
        "warmup/metrics.json",
        "logs/update/0002.log",
        "benchmarks/update/0002.tsv",
    ):
        assert (chain / name).stat().st_size > 0, name
    assert json.loads((chain / "tracking.json").read_text())["ok"] is True
    assert (undisturbed / "smoke" / "report" / "figures" / "learning_curve.png").is_file()


def test_the_chains_config_reproduces_it_alone(undisturbed: Path) -> None:
    config = yaml.safe_load((undisturbed / "smoke" / "main" / "seed-0" / "config.yaml").read_text())
    assert (config["seeds"], config["variants"], config["iterations"]) == ([0], {"main": {}}, 3)


def test_killed_in_the_middle_and_resumed_cold_on_one_core_it_ends_with_the_same_bytes(
    undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copy(SMOKE, tmp_path)
    killed = llmppo_run(tmp_path, cores=2)
    second_update = tmp_path / "results/smoke/main/seed-0/logs/update/0002.log"
    deadline = time.monotonic() + 600
    while not second_update.exists():  # the update of iteration 2 has begun
        assert killed.poll() is None, killed.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "results/smoke/report").exists()
    resumed = llmppo_run(tmp_path, 1, "--no-worker")
    output, _ = resumed.communicate()
    assert resumed.returncode == 0, output
    assert "iteration 1/3" not in output  # what was finished stays
    assert result_hashes(tmp_path / "results") == result_hashes(undisturbed)


def test_the_loop_in_one_process_gives_the_same_numbers(undisturbed: Path, tmp_path: Path) -> None:
    import torch

    from llmppo import LLMPPO, train_llm_rollout
    from llmppo.config import SamplingConfig
    from llmppo.envs.loading import harness_factory
    from llmppo.experiment import load_experiment, variant_config
    from llmppo.stages.loading import load_base, load_tokenizer

    torch.set_num_threads(1)
    config = variant_config(load_experiment(SMOKE), "main")
    (base,) = (undisturbed / "shared" / "base_model").iterdir()
    tokenizer = load_tokenizer(base)
    agent = LLMPPO(
        tokenizer.pad_token_id,
        tokenizer.pad_token,
        actor_network=load_base(base),
        lora_config=config.lora,
        seed=0,
        **config.ppo.model_dump(),
        **config.rollout.model_dump(include=set(SamplingConfig.model_fields)),
    )
    train_llm_rollout(
        [agent],
        config.env.max_turns,
        harness_factory(config.env, config.rollout, tokenizer),
        iterations=config.iterations,
        shard_size=config.rollout.shard_size,
        verbose=False,
    )
    chain = undisturbed / "smoke" / "main" / "seed-0"
    trained = [row for row in agent.history if row["split"] == "train"]
    assert [row["iteration"] for row in trained] == [1, 2, 3]
    for row in trained:
        expected = without_times(chain / "iterations" / f"{row['iteration']:04d}" / "metrics.json")["metrics"]
        assert {name: row[name] for name in expected} == expected
    agent.save_checkpoint(tmp_path / "policy")
    for name in ("actor", "critic", "reference"):
        file = f"{name}/adapter_model.safetensors"
        assert (tmp_path / "policy" / file).read_bytes() == (chain / "policy" / "0003" / file).read_bytes()
