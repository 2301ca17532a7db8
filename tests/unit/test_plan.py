"""Settings of each stage, hashes of shared artefacts, and the chain of iterations."""

import json
from typing import Any

import pytest

from llmppo.errors import ConfigError
from llmppo.experiment import parse_experiment
from llmppo.layout import Layout
from llmppo.plan import Plan, stage_settings

TINY: dict[str, Any] = {"name": "study", "base_model": {"kind": "tiny", "warm_start": None}, "iterations": 7}


def plan(**changes: Any) -> Plan:
    return Plan(parse_experiment({**TINY, **changes}))


def test_iterations_are_padded_and_placeholders_pass_through() -> None:
    layout = Layout("out", "study")
    assert layout.policy("main", 3, 12) == "out/study/main/seed-3/policy/0012"
    assert (
        layout.policy("{variant}", "{seed}", "{iteration}")
        == "out/study/{variant}/seed-{seed}/policy/{iteration}"
    )
    assert layout.rollout("main", 0, 1, 2) == "out/study/main/seed-0/iterations/0001/rollouts/shard-2.parquet"


def test_evaluated_are_the_first_every_kth_and_the_last() -> None:
    assert plan(evaluation={"every": 3}).evaluated() == [0, 3, 6, 7]
    assert plan(evaluation={"every": 7}).evaluated() == [0, 7]
    assert plan(evaluation={"every": 100}).evaluated() == [0, 7]


def test_a_batch_is_split_into_shards_of_fixed_size() -> None:
    assert list(plan(ppo={"batch_size": 10}, rollout={"shard_size": 4}).shards("main")) == [0, 1, 2]
    assert list(plan(ppo={"batch_size": 8}, rollout={"shard_size": 4}).shards("main")) == [0, 1]
    assert list(plan(ppo={"batch_size": 3}, rollout={"shard_size": 4}).shards("main")) == [0]


def test_warmup_rollouts_are_steps_times_shards_in_order() -> None:
    many = plan(ppo={"batch_size": 8, "critic_warmup_steps": 2}, rollout={"shard_size": 4})
    names = ["/".join(path.split("/")[-2:]) for path in many.warmup_rollouts("main", 0)]
    assert names == [f"step-{step}/shard-{shard}.parquet" for step in (1, 2) for shard in (0, 1)]
    assert plan().warmup_rollouts("main", 0) == []


def test_a_base_model_belongs_to_a_seed_only_when_it_is_built_by_seed() -> None:
    own = plan(seeds=[0, 1])
    assert own.base_keys["main", 0] != own.base_keys["main", 1]
    assert own.base_seed("main", 1) == 1
    shared = plan(seeds=[0, 1], base_model={"kind": "tiny", "per_seed": False, "warm_start": None})
    assert shared.base_keys["main", 0] == shared.base_keys["main", 1]
    assert shared.base_seed("main", 1) == 0
    assert (
        shared.base_keys["main", 0]
        == plan(seeds=[5], base_model={"kind": "tiny", "per_seed": False, "warm_start": None}).base_keys[
            "main", 5
        ]
    )


def test_variants_share_what_their_settings_agree_on() -> None:
    study = plan(variants={"a": {}, "b": {"ppo": {"clip_coef": 0.1}}, "c": {"rollout": {"temperature": 0.5}}})
    assert study.base_keys["a", 0] == study.base_keys["b", 0] == study.base_keys["c", 0]
    assert study.warmup_keys["a", 0] == study.warmup_keys["b", 0] != study.warmup_keys["c", 0]
    assert study.base_models == {study.base_keys["a", 0]: ("a", 0)}


@pytest.mark.parametrize(
    "changes",
    [
        {"ppo": {"clip_coef": 0.1}},
        {"ppo": {"beta": 0.5, "kl_placement": "reward"}},
        {"ppo": {"gae_lambda": 0.5}},
        {"ppo": {"update_epochs": 3, "critic_warmup_epochs": 1}},
        {"ppo": {"lr_actor": 1.0}},
        {"evaluation": {"episodes": 3}},
        {"iterations": 99},
        {"stop_at": {"value": 0.5}},
    ],
    ids=str,
)
def test_what_a_warmup_does_not_read_does_not_change_it(changes: dict[str, Any]) -> None:
    before = plan(ppo={"critic_warmup_epochs": 1})
    assert plan(**changes).settings("rollout", "main") == before.settings("rollout", "main")
    if "ppo" in changes:
        changes = {"ppo": {"critic_warmup_epochs": 1, **changes["ppo"]}}
    else:
        changes = {**changes, "ppo": {"critic_warmup_epochs": 1}}
    assert plan(**changes).settings("critic_warmup", "main") == before.settings("critic_warmup", "main")


def test_indirect_defaults_of_a_warmup_are_resolved() -> None:
    ppo = plan(ppo={"lr_critic": None, "lr_actor": 0.5, "update_epochs": 3}).settings(
        "critic_warmup", "main"
    )["ppo"]
    assert ppo["lr_critic"] == 0.5
    assert ppo["critic_warmup_epochs"] == 3


def test_iterations_seeds_and_places_are_in_no_training_stage() -> None:
    small, large = plan(), plan(iterations=70, seeds=[4, 5], results="elsewhere", keep_every=3)
    for stage in ("base_model", "rollout", "critic_warmup", "update", "evaluate"):
        assert small.settings(stage, "main") == large.settings(stage, "main")


def test_the_chain_config_is_an_experiment_that_reproduces_the_chain() -> None:
    import json

    study = plan(seeds=[3, 4], variants={"a": {}, "b": {"ppo": {"clip_coef": 0.1}}})
    alone = Plan(parse_experiment(json.loads(study.chain_file("b", 4))["config"]))
    assert alone.chains == [("b", 4)]
    for stage in ("base_model", "rollout", "critic_warmup", "update", "evaluate"):
        assert alone.settings(stage, "b") == study.settings(stage, "b")
    assert alone.policy_manifest("b", 4, 7) == study.policy_manifest("b", 4, 7)


def test_an_evaluation_stops_only_where_one_exists() -> None:
    stopping = plan(stop_at={"value": 0.9}, evaluation={"every": 3})
    waits = [i for i in range(1, 8) if stopping.stop_evaluation("main", 0, i)]
    assert waits == [1, 4, 7]
    by_reward = plan(stop_at={"metric": "rollout/reward_mean", "value": 0.9})
    assert not any(by_reward.stop_evaluation("main", 0, i) for i in range(1, 8))
    assert not any(plan().stop_evaluation("main", 0, i) for i in range(1, 8))


def test_the_evaluation_of_a_last_iteration_does_not_stop_an_extended_chain() -> None:
    """Else a chain of 7 extended to 9 would differ from one that was planned with 9."""
    longer = plan(iterations=9, stop_at={"value": 0.9}, evaluation={"every": 3})
    assert not longer.stop_evaluation("main", 0, 8)


def test_targets_are_report_exports_and_tracking() -> None:
    assert list(plan(seeds=[0, 1]).targets()) == [
        "results/study/report/report.html",
        "results/study/main/seed-0/export/manifest.json",
        "results/study/main/seed-0/tracking.json",
        "results/study/main/seed-1/export/manifest.json",
        "results/study/main/seed-1/tracking.json",
    ]
    untracked = list(plan(tracking={"mlflow": False}).targets())
    assert not any("tracking" in target for target in untracked)


def test_a_dataset_is_an_input_of_its_own(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / name).touch()
    files = {"train": "train.jsonl", "eval": "eval.jsonl"}
    with_rows = plan(dataset=files)
    assert with_rows.dataset_sources("main") == ["train.jsonl", "eval.jsonl"]
    (manifest,) = with_rows.dataset_manifest("main")
    assert manifest == f"results/shared/dataset/{with_rows.dataset_keys['main']}/manifest.json"
    assert plan().dataset_manifest("main") == []
    assert with_rows.warmup_keys["main", 0] != plan().warmup_keys["main", 0]
    assert with_rows.settings("baselines", "main")["dataset_present"] is True


def test_local_model_files_are_inputs(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    local = plan(base_model={"kind": "pretrained", "path": str(tmp_path)})
    assert local.base_model_sources("main") == [str(tmp_path / "config.json")]
    assert plan(base_model={"kind": "pretrained", "path": "owner/model"}).base_model_sources("main") == []
    model = str(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").touch()
    assert plan(base_model={"kind": "gguf", "file": model}).base_model_sources("main") == [model]
    assert plan(base_model={"kind": "gguf", "package": "p"}).base_model_sources("main") == []


def test_files_of_warm_starts_and_folders_of_datasets_are_inputs(tmp_path: Any) -> None:
    rows, folder = tmp_path / "rows.jsonl", tmp_path / "saved"
    rows.write_text("{}")
    folder.mkdir()
    for name in ("state.json", "data.arrow"):
        (folder / name).write_text("{}")
    start = {
        "dialogues": "llmppo.envs.dataset_env:demonstration",
        "kwargs": {"path": str(rows), "right": 0.1},
    }
    tiny = {**TINY["base_model"], "warm_start": start}
    assert plan(base_model=tiny).base_model_sources("main") == [str(rows)]
    assert plan().base_model_sources("main") == []
    with_folder = plan(dataset={"train": str(folder), "eval": str(rows)})
    assert with_folder.dataset_sources("main") == [
        str(folder / "data.arrow"),
        str(folder / "state.json"),
        str(rows),
    ]


def test_names_of_shared_folders_are_refused() -> None:
    with pytest.raises(ConfigError, match="name: `shared`"):
        plan(name="shared")


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match="no stage"):
        stage_settings(parse_experiment(TINY), "nothing")


def test_a_summary_counts_variants_and_seeds() -> None:
    assert plan(seeds=[0, 1]).summary() == (
        "study: 1 variant x 2 seeds, 7 iterations of 16 episodes, results in results/study"
    )


def test_policies_are_pruned_two_updates_later_unless_kept_or_evaluated() -> None:
    study = plan(iterations=9, keep_every=4, evaluation={"every": 3})
    # Update i may touch policy i - 2: policy 0 stays, 3 and 6 are evaluated, 4 is kept.
    assert [study.prunable(i) for i in range(1, 10)] == [
        "", "", "weights", "weights", "optimizer", "optimizer", "weights", "optimizer", "weights"
    ]  # fmt: skip


def test_the_report_sees_variants_in_the_order_of_the_file() -> None:
    ordered = plan(variants={"b": {}, "a": {}})
    assert list(json.loads(ordered.settings_json("report"))["variants"]) == ["b", "a"]
