"""The whole pipeline with its real stages: killed in the middle and resumed, it ends with the same bytes.

The undisturbed run forks its stages from a worker; the resumed one starts them cold.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from real_results import result_hashes, without_times
from workflow_runs import FASTER_NAME, SMOKE, llmppo_run

from llmppo.ownership import hold
from llmppo.reporting.show import rollouts
from llmppo.verify import check

pytestmark = [pytest.mark.workflow, pytest.mark.slow]


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


def llmppo(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("llmppo")), *arguments, "--config", "smoke.yaml"],
        cwd=results.parent, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ((), "nothing is left to do"),
        (("iterations=4",), r"rollout +2 +nothing made yet"),
        (("ppo.clip_coef=0.3",), r"update +1 +its settings or the code behind it changed"),
        (("ppo.clip_coef=0.3",), r"rollout +4 +a job before it runs again"),
        (("seeds=[0, 1]",), "main seed 1 +0 of 3 +not begun"),
    ],
)
def test_status_tells_what_is_left_and_why(
    undisturbed: Path, changes: tuple[str, ...], expected: str
) -> None:
    told = llmppo(undisturbed, "status", *[word for change in changes for word in ("--set", change)])
    assert told.returncode == 0, told.stderr
    assert re.search(r"main seed 0 +3 of", told.stdout)
    assert re.search(expected, told.stdout), told.stdout


def test_status_of_a_run_at_work(undisturbed: Path) -> None:
    with hold(undisturbed / ".run.lock"):
        told = llmppo(undisturbed, "status")
    assert f"running: process {os.getpid()} on" in told.stdout
    assert "left" not in told.stdout


@pytest.mark.parametrize(
    "file",
    [
        "iterations/0002/rollouts/shard-1.parquet",
        "policy/0003/actor/adapter_model.safetensors",
        "evaluations/0003/metrics.json",
    ],
)
def test_verify_repeats_a_stage_and_finds_the_same(undisturbed: Path, file: str) -> None:
    chain = undisturbed / "smoke" / "main" / "seed-0"
    before = result_hashes(undisturbed)
    told = llmppo(undisturbed, "verify", "--repeat", str(chain / file))
    assert told.returncode == 0, told.stdout + told.stderr
    assert ", 0 damaged" in told.stdout
    assert f"the same  {chain / file}" in told.stdout
    assert "differs" not in told.stdout
    assert result_hashes(undisturbed) == before
    assert not list(undisturbed.parent.glob(".verify-*"))


def test_an_update_that_lost_its_optimizer_state_is_not_repeated_without(undisturbed: Path) -> None:
    told = llmppo(undisturbed, "verify", "--repeat", "results/smoke/main/seed-0/iterations/0002/metrics.json")
    assert told.returncode == 1
    assert "lost its optimizer state once later policies existed" in told.stderr


def place_of_data(path: Path) -> int:
    """A place in a file; of Parquet within the last page of its largest column, since a page's header has no checksum."""
    if path.suffix != ".parquet":
        return path.stat().st_size // 3
    import pyarrow.parquet as pq

    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    largest = max(chunks, key=lambda chunk: chunk.total_compressed_size)
    start = largest.dictionary_page_offset or largest.data_page_offset
    return start + largest.total_compressed_size - 2


@pytest.mark.parametrize(
    "file",
    [
        "smoke/main/seed-0/iterations/0002/rollouts/shard-0.parquet",
        "smoke/main/seed-0/iterations/0001/advantages.parquet",
        "smoke/main/seed-0/policy/0003/critic/adapter_model.safetensors",
        "smoke/main/seed-0/policy/0003/trainer.json",
        "smoke/main/seed-0/evaluations/0003/greedy.parquet",
        "smoke/main/seed-0/warmup/metrics.json",
        "smoke/main/seed-0/config.yaml",
    ],
)
@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_verify_names_a_damaged_file(undisturbed: Path, tmp_path: Path, file: str, damage: str) -> None:
    copy = tmp_path / "results"
    shutil.copytree(undisturbed, copy)
    content = bytearray((copy / file).read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[place_of_data(copy / file)] ^= 0x80  # no ASCII any more, and no float near what it was
    (copy / file).write_bytes(content)
    faults = [entry.fault for entry in check(copy) if entry.fault is not None]
    assert len(faults) == 1
    assert Path(file).name in faults[0]
    assert "delete" in faults[0]


def test_verify_tells_of_a_stage_that_differs(undisturbed: Path, tmp_path: Path) -> None:
    """Episodes of another policy under this one's name."""
    shutil.copytree(undisturbed.parent, tmp_path / "copy")
    results = tmp_path / "copy" / "results"
    (results / ".home.json").unlink()
    iterations = results / "smoke" / "main" / "seed-0" / "iterations"
    shutil.copy(iterations / "0003/rollouts/shard-0.parquet", iterations / "0002/rollouts/shard-0.parquet")
    told = llmppo(results, "verify", "--repeat", str(iterations / "0002/rollouts/shard-0.parquet"))
    assert told.returncode == 1
    assert f"differs  {iterations / '0002/rollouts/shard-0.parquet'}" in told.stdout


def test_verify_takes_only_files_of_the_results(undisturbed: Path) -> None:
    told = llmppo(undisturbed, "verify", "--repeat", "smoke.yaml")
    assert told.returncode == 1
    assert "smoke.yaml is no file below results" in told.stderr


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


def update_metrics(results: Path, variant: str, iteration: int) -> dict[str, float]:
    path = results / "smoke" / variant / "seed-0" / "iterations" / f"{iteration:04d}" / "metrics.json"
    return json.loads(path.read_text())["metrics"]


def test_a_replay_with_nothing_changed_is_the_original(undisturbed: Path, replayed: Path) -> None:
    hashes = {
        variant: {
            name.removeprefix(f"smoke/{variant}/"): value
            for name, value in result_hashes(results).items()
            if name.startswith(f"smoke/{variant}/seed-0/policy/")
        }
        for variant, results in (("main", undisturbed), ("same", replayed / "results"))
    }
    weights = {name for name in hashes["main"] if name.endswith(".safetensors")}
    assert len(weights) > 10
    assert {name: hashes["same"].get(name) for name in weights} == {
        name: hashes["main"][name] for name in weights
    }
    for iteration in (1, 2, 3):
        metrics = update_metrics(replayed / "results", "same", iteration)
        assert metrics["replay/kl"] < 1e-6
        assert metrics["replay/ess_episodes"] > 0.9999


def test_a_replay_learns_from_stored_rollouts_and_says_how_far_off_they_are(replayed: Path) -> None:
    results, name = replayed / "results", FASTER_NAME
    assert not list((results / "smoke" / name).glob("seed-0/iterations/*/rollouts"))
    first, last = (update_metrics(results, name, iteration) for iteration in (1, 3))
    assert first["replay/kl"] < 1e-6  # policy 0 is the original's
    assert last["replay/kl"] > 1e-3
    assert last["replay/ess_episodes"] < last["replay/ess_tokens"] < 1
    assert last["rollout/reward_mean"] == update_metrics(results, "main", 3)["rollout/reward_mean"]
    assert last["critic/loss"] != update_metrics(results, "main", 3)["critic/loss"]
    told = (replayed / "told.txt").read_text()
    assert f"{name}: evaluated success" in told
    assert f"KL {last['replay/kl']:.4f} nats a token" in told
    page = (results / "smoke" / "report" / "report.html").read_text()
    assert f"{name} is a replay: it learned from the stored rollouts of main" in page
    assert "KL of the stored rollouts" in page
    assert f"{name},main,final success" in (results / "smoke" / "report" / "comparison.csv").read_text()


def test_show_has_the_originals_episodes_with_the_replays_advantages(replayed: Path) -> None:
    chains = [replayed / "results" / "smoke" / name / "seed-0" for name in ("main", FASTER_NAME)]
    theirs, mine = (rollouts(chain, 3) for chain in chains)
    assert [entry.episode.spec for entry in mine] == [entry.episode.spec for entry in theirs]
    assert any(
        (a.worth.values != b.worth.values).any()
        for a, b in zip(mine, theirs, strict=True)
        if a.worth and b.worth
    )


def test_a_changed_original_is_not_replayed(replayed: Path) -> None:
    """Its rollouts would be sampled again."""
    (config,) = sorted((replayed / "results/smoke/logs").glob("snakemake-*.yaml"))[-1:]
    kept = config.read_text()
    config.write_text(yaml.safe_dump({**yaml.safe_load(kept), "iterations": 4}, sort_keys=False))
    told = subprocess.run(
        [str(Path(sys.executable).with_name("llmppo")), "replay", "results/smoke", "--set", "ppo.gamma=0.5"],
        cwd=replayed, capture_output=True, text=True, check=False,
    )  # fmt: skip
    config.write_text(kept)
    assert told.returncode == 1
    assert (
        "is not finished, or what made it changed: 2 sampling jobs would run (rollout: nothing made yet"
        in told.stderr
    )


def test_several_iterations_in_a_job_give_the_same_bytes(undisturbed: Path, tmp_path: Path) -> None:
    shutil.copy(SMOKE, tmp_path)
    run = llmppo_run(tmp_path, 2, "--no-worker", "--set", "iterations_per_job=2")
    output, _ = run.communicate()
    assert run.returncode == 0, output
    hashes = result_hashes(tmp_path / "results")
    assert hashes.pop("smoke/jobs.json")  # iterations 1 and 2, then 3
    assert hashes == result_hashes(undisturbed)
    logs = tmp_path / "results/smoke/main/seed-0/logs"
    assert [path.name for path in sorted(logs.glob("iterations/*.log"))] == ["0001-0002.log"]
    assert [path.name for path in sorted(logs.glob("update/*.log"))] == ["0003.log"]


def test_two_ranks_write_what_one_process_would(undisturbed: Path, tmp_path: Path) -> None:
    """Each stage that learns runs as two processes, and the worker does the others."""
    from safetensors.torch import load_file

    from llmppo.trajectories.parquet import read_episodes

    shutil.copy(SMOKE, tmp_path)
    run = llmppo_run(tmp_path, 2, "--set", "ranks=2", "--set", "iterations=1")
    output, _ = run.communicate()
    assert run.returncode == 0, output
    ours, alone = (folder / "smoke/main/seed-0" for folder in (tmp_path / "results", undisturbed))
    sampled, expected = (
        [
            episode.token_ids.tolist()
            for episode in read_episodes([chain / "iterations/0001/rollouts/shard-0.parquet"])
        ]
        for chain in (ours, alone)
    )
    assert sampled == expected
    for name in ("policy/0000/critic", "policy/0001/actor", "policy/0001/critic"):
        found, expected = (load_file(chain / name / "adapter_model.safetensors") for chain in (ours, alone))
        assert found.keys() == expected.keys()
        for weight, tensor in found.items():
            assert (tensor - expected[weight]).norm() <= 1e-3 * expected[weight].norm() + 1e-6


def test_a_rank_that_fails_is_told(undisturbed: Path, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump({**yaml.safe_load(SMOKE.read_text()), "ranks": 2}))
    (base,) = (undisturbed / "shared" / "base_model").iterdir()
    failed = subprocess.run(
        [
            *(Path(sys.executable).with_name("llmppo"), "update", "--settings", tmp_path / "two.yaml", "--base", base),
            *("--policy", tmp_path, "--seed", "0", "--iteration", "1", "--out", tmp_path / "out", "--log", tmp_path / "log"),
            *("--advantages", tmp_path / "a", "--metrics", tmp_path / "m", undisturbed / "smoke/main/seed-0/iterations/0001/rollouts/shard-0.parquet"),
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert failed.returncode == 1
    assert f"a process of 2 ended with an error; what it said is in {tmp_path / 'log'}" in failed.stderr
    assert "llmppo update: error:" in (tmp_path / "log").read_text()


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
