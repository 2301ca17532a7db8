"""After an edit exactly the jobs that depend on it run: dry runs of a finished experiment, with fake stages.

The experiment: seeds 0 and 1, 3 iterations of 2 shards, evaluations of policies 0, 2 and 3, one warm-up step.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from workflow_runs import REPOSITORY, Bench

pytestmark = pytest.mark.workflow

KEY = re.compile(r"key=[0-9a-f]{12}(, )?")


def jobs(
    rule: str,
    *,
    seeds: Iterable[int] = (0, 1),
    variant: str = "main",
    iterations: Iterable[int] = (),
    shards: int = 0,
) -> Counter[str]:
    """Jobs of a rule by the names that `planned` gives them."""
    names = [f"{rule} variant={variant}, seed={seed}" for seed in seeds]
    if iterations:
        names = [f"{name}, iteration={iteration:04d}" for name in names for iteration in iterations]
    if shards:
        names = [f"{name}, shard={shard}" for name in names for shard in range(shards)]
    return Counter(names)


def shared(rule: str, wildcards: str = "", count: int = 1) -> Counter[str]:
    """Jobs of shared artefacts, whose keys are hashes."""
    return Counter({f"{rule} {wildcards}".strip(): count})


def warmup_rollouts(step: int, chains: int = 2) -> Counter[str]:
    return shared("warmup_rollout", f"step={step}, shard=0", chains) + shared(
        "warmup_rollout", f"step={step}, shard=1", chains
    )


def planned(bench: Bench, *arguments: str) -> Counter[str]:
    """Jobs of a dry run, those of shared artefacts without their keys."""
    return Counter(KEY.sub("", job).strip() for job in bench.planned(*arguments))


REPORT = Counter(["report"])
CONFIGS = jobs("variant_config")
CLOSING = REPORT + jobs("export") + jobs("track")  # what follows from new results


def evaluations(*iterations: int, **chains: Any) -> Counter[str]:
    return jobs("evaluate", iterations=iterations, **chains)


def trained(shards: int = 2, **chains: Any) -> Counter[str]:
    """Updates, what is sampled with their policies, and evaluations of these."""
    return (
        jobs("update", iterations=(1, 2, 3), **chains)
        + jobs("rollout", iterations=(2, 3), shards=shards, **chains)
        + evaluations(2, 3, **chains)
    )


def from_policy_0(shards: int = 2, **chains: Any) -> Counter[str]:
    """All of a chain but its warm-up rollouts."""
    return (
        jobs("critic_warmup", **chains)
        + jobs("rollout", iterations=(1,), shards=shards, **chains)
        + trained(shards=shards, **chains)
        + evaluations(0, **chains)
    )


ALL_OF_MAIN = from_policy_0() + CLOSING + CONFIGS


@dataclass(frozen=True)
class Edit:
    """What somebody changes after a finished run, and the jobs that must follow.

    `config`: top-level sections; `code`: a module of ours that gets one more constant; `files`: files of the
    working directory; `versions`: packages that are newer; `arguments` of Snakemake.
    """

    name: str
    expected: Counter[str]
    config: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    files: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


NOTHING = Counter[str]()
REPLAY = {"main": {}, "again": {"replays": "main", "ppo": {"clip_coef": 0.1}}}

EDITS = (
    Edit("nothing", NOTHING),
    # what the stages read
    Edit(
        "base model",
        shared("base_model", count=2) + warmup_rollouts(1) + ALL_OF_MAIN,
        {"base_model": {"hidden_size": 32}},
    ),
    Edit("environment", shared("baselines") + warmup_rollouts(1) + ALL_OF_MAIN, {"env": {"max_turns": 3}}),
    Edit("limits of the environment", warmup_rollouts(1) + ALL_OF_MAIN, {"env": {"retries": 2}}),
    Edit("sampling", warmup_rollouts(1) + ALL_OF_MAIN, {"rollout": {"temperature": 0.7}}),
    Edit(
        "shards",
        shared("warmup_rollout", "step=1, shard=0", 2) + from_policy_0(shards=1) + CLOSING + CONFIGS,
        {"rollout": {"shard_size": 8}},
    ),
    Edit("adapters", ALL_OF_MAIN, {"lora": {"r": 4}}),
    Edit("learning rate of the critic", ALL_OF_MAIN, {"ppo": {"lr_critic": 1e-3}}),
    Edit("a longer warm-up", warmup_rollouts(2) + ALL_OF_MAIN, {"ppo": {"critic_warmup_steps": 2}}),
    Edit("no warm-up", ALL_OF_MAIN, {"ppo": {"critic_warmup_steps": 0}}),
    Edit("clip range", trained() + CLOSING + CONFIGS, {"ppo": {"clip_coef": 0.1}}),
    Edit(
        "early stop",
        trained() + CLOSING + CONFIGS,
        {"stop_at": {"metric": "rollout/success_rate", "value": 2}},
    ),
    Edit("evaluation", evaluations(0, 2, 3) + CLOSING + CONFIGS, {"evaluation": {"episodes": 16}}),
    Edit("denser evaluation", evaluations(1) + CLOSING + CONFIGS, {"evaluation": {"every": 1}}),
    Edit("export", jobs("export") + jobs("track") + CONFIGS + REPORT, {"export": {"merged": False}}),
    Edit("description", jobs("export") + jobs("track") + CONFIGS + REPORT, {"description": "Another try."}),
    Edit("tracker", shared("mlflow_init") + jobs("track"), {"tracking": {"uri": "sqlite:///elsewhere.db"}}),
    Edit("report", REPORT, {"report": {"transcripts": 2}}),
    Edit(
        "threads of evaluations",
        evaluations(0, 2, 3) + CLOSING + CONFIGS,
        {"resources": {"evaluate": {"threads": 2}}},
    ),
    Edit(
        "memory and time, no tracker, other policies kept, longer jobs",
        NOTHING,
        {
            "resources": {"update": {"mem_mb": 9000, "runtime": 7}},
            "tracking": {"mlflow": False},
            "keep_every": 3,
            "iterations_per_job": 2,
        },
    ),
    # the size of the experiment
    Edit(
        "more iterations",
        jobs("update", iterations=(4, 5))
        + jobs("rollout", iterations=(4, 5), shards=2)
        + evaluations(4, 5)
        + CLOSING
        + CONFIGS,
        {"iterations": 5},
    ),
    Edit("fewer iterations", CLOSING + CONFIGS, {"iterations": 2}),
    Edit(
        "one more seed",
        shared("base_model")
        + warmup_rollouts(1, chains=1)
        + from_policy_0(seeds=[2])
        + REPORT
        + jobs("export", seeds=[2])
        + jobs("track", seeds=[2])
        + jobs("variant_config", seeds=[2]),
        {"seeds": [0, 1, 2]},
    ),
    Edit("one seed less", REPORT, {"seeds": [0]}),
    Edit(
        "a variant",
        from_policy_0(variant="narrow")
        + REPORT
        + jobs("export", variant="narrow")
        + jobs("track", variant="narrow")
        + jobs("variant_config", variant="narrow"),
        {"variants": {"main": {}, "narrow": {"ppo": {"clip_coef": 0.1}}}},
    ),
    Edit(
        "a replay",
        jobs("critic_warmup", variant="again")
        + jobs("replay", variant="again", iterations=(1, 2, 3))
        + evaluations(0, 2, 3, variant="again")
        + REPORT
        + jobs("export", variant="again")
        + jobs("track", variant="again")
        + jobs("variant_config", variant="again"),
        {"variants": REPLAY},
    ),
    # the code
    Edit("code of the evaluation", evaluations(0, 2, 3) + CLOSING, code="stages/evaluate.py"),
    Edit("code of the losses", ALL_OF_MAIN - CONFIGS, code="ppo/losses.py"),
    Edit("code of the report", REPORT, code="reporting/figures.py"),
    Edit("code of commands", NOTHING, code="cli.py"),
    # what is installed: numbers stay those of the versions that made them
    Edit(
        "upgraded packages, another lock file",
        NOTHING,
        files={"requirements.lock": "torch==99.0\n"},
        versions={"numpy": "99.0", "torch": "99.0", "transformers": "99.0", "mlflow": "99.0"},
    ),
    Edit(
        "cores and profile",
        NOTHING,
        files={"another/profile.yaml": "scheduler: ilp\nkeep-going: true\n"},
        arguments=("--cores", "7", "--profile", "another"),
    ),
)


@pytest.fixture
def edited(finished: Bench, tmp_path: Path) -> Iterator[Callable[[Edit], Bench]]:
    """Makes an edit of the finished experiment, which is undone after the test."""
    written: list[Path] = []

    def make(edit: Edit) -> Bench:
        path = []
        if edit.code:
            shutil.copytree(
                REPOSITORY / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__")
            )
            with open(tmp_path / "src" / "llmppo" / edit.code, "a") as file:
                file.write("\n\nONE_MORE = 1\n")
            path.append(tmp_path / "src")
        for name, version in edit.versions.items():
            told = tmp_path / "newer" / f"{name}-{version}.dist-info" / "METADATA"
            told.parent.mkdir(parents=True)
            told.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            path.append(tmp_path / "newer")
        for name, text in edit.files.items():
            written.append(finished.folder / name)
            written[-1].parent.mkdir(exist_ok=True)
            written[-1].write_text(text)
        finished.write_config(**edit.config)
        before = os.environ.get("PYTHONPATH")
        path += [before] if before else []
        return replace(finished, environment={"PYTHONPATH": os.pathsep.join(map(str, path))})

    yield make
    for file in written:
        file.unlink()
    finished.write_config()


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.name)
def test_an_edit_reruns_exactly_what_depends_on_it(edited: Callable[[Edit], Bench], edit: Edit) -> None:
    assert planned(edited(edit), *edit.arguments) == edit.expected


def test_a_replay_runs_beside_jobs_of_several_iterations(bench: Bench) -> None:
    bench.write_config(variants=REPLAY, seeds=[0], iterations_per_job=2)
    bench.run()
    again = bench.results / "tiny" / "again" / "seed-0"
    assert (again / "policy" / "0003" / "manifest.json").is_file()
    assert not list(again.glob("iterations/*/rollouts"))
    assert bench.planned() == set()


@pytest.mark.parametrize("what", ["the results alone", "all of the directory"])
def test_moved_or_copied_results_go_on(finished: Bench, tmp_path: Path, what: str) -> None:
    """The copies have lost the times of their files."""
    new = replace(finished, folder=tmp_path / "new place")
    if what == "the results alone":
        new.folder.mkdir()
        shutil.copytree(finished.results, new.results, copy_function=shutil.copy)
    else:
        shutil.copytree(finished.folder, new.folder, copy_function=shutil.copy)
    new.write_config()
    before = new.hashes()
    refused = new.snakemake("-n", check=False)
    assert refused.returncode == 1
    assert f"results was made from {finished.folder}" in refused.stderr
    assert "llmppo adopt" in refused.stderr
    told = new.llmppo("status", check=False)
    assert told.stderr.startswith(f"llmppo status: error: {new.results.name} was made from {finished.folder}")
    other = new.llmppo("adopt", "--set", "ppo.clip_coef=0.1", "--set", "iterations=4", check=False)
    assert other.returncode == 1
    assert "was made with other values of iterations, ppo.clip_coef" in other.stderr
    store = new.results / "mlflow.db"
    store.write_text("no store of MLflow's, whose artefacts could come along")
    assert "mlflow.db can't be used" in new.llmppo("adopt", check=False).stderr
    store.unlink()
    assert "2 of 2 chains" in new.llmppo("adopt").stdout
    assert planned(new) == NOTHING
    new.write_config(iterations=4)
    assert planned(new) == (
        jobs("update", iterations=[4])
        + jobs("rollout", iterations=[4], shards=2)
        + evaluations(4)
        + CLOSING
        + CONFIGS
    )
    if what == "all of the directory":
        return  # the other one runs
    new.run()
    after = new.hashes()
    changed = {name for name in before if after.get(name) != before[name]}
    assert {Path(name).name for name in changed} <= {
        "config.yaml", "report.html", "rollouts.html", "summary.csv", "learning_curve.png", "tracking.json", "mlflow.html",
    } | {Path(name).name for name in changed if "/export/" in name}  # fmt: skip
    assert planned(new) == NOTHING


def moved(bench: Bench, name: str) -> Bench:
    """The working directory elsewhere, without Snakemake's notes."""
    folder = bench.folder.with_name(f"{bench.folder.name} {name}")
    shutil.copytree(bench.folder, folder, ignore=shutil.ignore_patterns(".snakemake"))
    return replace(bench, folder=folder)


def test_results_of_two_settings_are_not_adopted(bench: Bench) -> None:
    """A run that is interrupted after an edit leaves files of both, and nothing in them tells which is which."""
    bench.write_config(seeds=[0])
    bench.run()
    bench.write_config(seeds=[0], ppo={"clip_coef": 0.1})
    bench.snakemake("--cores", "2", check=False, FAKE_STAGE_FAILS="update:1")
    told = moved(bench, "too early").llmppo("adopt", check=False).stderr
    assert "main/seed-0 was being made anew after an edit" in told
    bench.llmppo("run")
    assert "1 of 1 chains" in moved(bench, "finished").llmppo("adopt").stdout


def test_results_of_other_code_or_data_are_not_adopted(bench: Bench) -> None:
    game, rows = "class Game:\n    tries = {}\n", '{{"question": "{}", "answer": "b"}}\n'
    (bench.folder / "game.py").write_text(game.format(1))
    (bench.folder / "rows.jsonl").write_text(rows.format(1))
    (bench.folder / "held_out.jsonl").write_text(rows.format(0))
    data = {"train": "rows.jsonl", "eval": "held_out.jsonl"}
    bench.write_config(seeds=[0], env={"factory": "game:Game"}, dataset=data)
    bench.run()
    for name, text in (("game.py", game), ("rows.jsonl", rows)):
        elsewhere = moved(bench, name)
        (elsewhere.folder / name).write_text(text.format(2))
        told = elsewhere.llmppo("adopt", check=False).stderr
        assert "main/seed-0 was made with other code of yours, or other data" in told
        (elsewhere.folder / name).write_text(text.format(1))
        assert "1 of 1 chains" in elsewhere.llmppo("adopt").stdout


def test_data_that_an_older_file_replaces_is_noticed(bench: Bench) -> None:
    rows = bench.folder / "rows.jsonl"
    rows.write_text('{"question": "a", "answer": "b"}\n')
    shutil.copy(rows, bench.folder / "held_out.jsonl")
    bench.write_config(seeds=[0], dataset={"train": "rows.jsonl", "eval": "held_out.jsonl"})
    bench.run()
    assert planned(bench) == NOTHING
    rows.write_text('{"question": "c", "answer": "d"}\n')
    os.utime(rows, (1, 1))
    assert "dataset" in planned(bench)
