"""Policy folders: round trips bit by bit, resuming, threads, mismatches, damage, and plain PEFT."""

import ast
import json
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file

import llmppo
from llmppo import LLMPPO, save_llm_checkpoint
from llmppo.config import LoraSection
from llmppo.errors import ArtefactError, ConfigError
from llmppo.files import write_manifest
from llmppo.testing.batches import VOCABULARY, made_up_batch, tiny_agent, unlike_adapters, weights
from llmppo.testing.models import tiny_model

FAST = {"lr_actor": 1e-2, "lr_critic": 1e-2}


def base(**changes):
    return tiny_model(0, 2, 16, **({"heads": 2, "kv_heads": 1, "vocab_size": VOCABULARY} | changes))


def moments(agent):
    return agent.optimizer.state(agent._parameter_names())


def same(ours, theirs):
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "settings", [{}, {"critic": "head"}, {"use_separate_reference_adapter": False}], ids=str
)
def test_round_trip_is_bit_identical(settings, tmp_path):
    agent = tiny_agent(**FAST, **settings, normalize_returns=True, critic_warmup_steps=1)
    for _ in range(2):
        agent.learn(made_up_batch())
    agent.steps, agent.scores, agent.fitness, agent.reference_update_tracker = 12, [0.5], [0.25, 1.0], 3
    save_llm_checkpoint(agent, tmp_path / "policy")
    fresh = tiny_agent(**FAST, **settings, normalize_returns=True, model_seed=0, seed=9, trained=False)
    fresh.load_checkpoint(tmp_path / "policy", load_optimizer=True)
    same(weights(fresh), weights(agent))
    same(moments(fresh), moments(agent))
    assert set(moments(fresh))  # there are moments
    for name in (
        "learn_steps",
        "critic_warmup_steps_done",
        "steps",
        "scores",
        "fitness",
        "reference_update_tracker",
    ):
        assert getattr(fresh, name) == getattr(agent, name), name
    assert fresh.running_returns == agent.running_returns
    fresh.save_checkpoint(tmp_path / "again")
    ours, theirs = files(tmp_path / "again"), files(tmp_path / "policy")
    assert {name for name in ours if ours[name] != theirs[name]} <= {
        "trainer.json",
        "manifest.json",
    }  # another seed


def test_equal_states_give_equal_files(tmp_path):
    for name in ("one", "two"):
        agent = tiny_agent(**FAST)
        agent.learn(made_up_batch())
        agent.save_checkpoint(tmp_path / name, iteration=1)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "manifest.json").read_text())["iteration"] == 1


@pytest.mark.parametrize("settings", [{}, {"critic": "head"}, {"normalize_returns": True}], ids=str)
def test_resuming_equals_never_having_stopped(settings, tmp_path):
    common = (
        FAST
        | settings
        | {"mini_batch_size": 3, "update_epochs": 2, "critic_warmup_steps": 1, "weight_decay": 0.1}
    )
    common |= {"cosine_lr_schedule_config": {"num_steps": 5, "warmup_proportion": 0.3}}
    batches = [made_up_batch(seed=seed) for seed in range(4)]
    straight = tiny_agent(**common)
    for batch in batches:
        straight.learn(batch)
    first = tiny_agent(**common)
    for batch in batches[:2]:
        first.learn(batch)
    first.save_checkpoint(tmp_path / "policy")
    second = tiny_agent(**common, trained=False)
    second.load_checkpoint(tmp_path / "policy", load_optimizer=True)
    for batch in batches[2:]:
        second.learn(batch)
    same(weights(second), weights(straight))
    same(moments(second), moments(straight))
    assert second.running_returns == straight.running_returns


def test_load_rebuilds_the_agent_with_its_settings(tmp_path):
    agent = tiny_agent(
        **FAST,
        seed=5,
        clip_coef=0.35,
        temperature=0.8,
        logit_bias={3: 1.0},
        lora=LoraSection(r=3, lora_alpha=7),
    )
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "policy")
    again = LLMPPO.load(tmp_path / "policy", actor_network=base())
    assert (again.config, again.sampling, again.seed, again.max_turns) == (agent.config, agent.sampling, 5, 3)
    same(weights(again), weights(agent))
    agent.learn(made_up_batch(seed=1))
    again.learn(made_up_batch(seed=1))
    same(weights(again), weights(agent))


def test_a_snapshot_is_written_while_learning_goes_on(tmp_path):
    """Written on another thread after more learn calls, it is still the state of its moment."""
    agent = tiny_agent(**FAST)
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "then")
    snapshot = agent.snapshot_checkpoint()
    started, may_write = threading.Event(), threading.Event()

    def write():
        started.set()
        may_write.wait(timeout=60)
        snapshot.write(tmp_path / "later")

    thread = threading.Thread(target=write)
    thread.start()
    started.wait(timeout=60)
    for seed in range(2):
        agent.learn(made_up_batch(seed=seed))
        may_write.set()
    thread.join(timeout=60)
    assert files(tmp_path / "later") == files(tmp_path / "then")
    assert snapshot.trainer["learn_steps"] == 1
    assert agent.learn_steps == 3


def test_the_whole_model_can_be_saved(tmp_path):
    """`lora_only=False` carries the base weights, so that another base takes them over."""
    agent = tiny_agent(**FAST)
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "whole", lora_only=False)
    agent.save_checkpoint(tmp_path / "adapters")
    assert (tmp_path / "whole" / "base.safetensors").is_file()
    assert not (tmp_path / "adapters" / "base.safetensors").exists()
    other = LLMPPO(
        actor_network=tiny_model(7, 2, 16, heads=2, kv_heads=1, vocab_size=VOCABULARY),
        lora_config=LoraSection(r=4, lora_alpha=8),
    )
    ids = torch.arange(6)[None]
    with agent.select_adapter("actor"):
        expected = agent.actor(input_ids=ids).logits
    other.use_adapter("actor")
    other.load_weights(tmp_path / "adapters")
    assert not torch.allclose(other.actor(input_ids=ids).logits, expected)
    other.load_weights(tmp_path / "whole")
    assert torch.equal(other.actor(input_ids=ids).logits, expected)


def test_a_checkpoint_of_another_base_shape_is_refused(tmp_path):
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "whole", lora_only=False)
    wider = LLMPPO(actor_network=base(vocab_size=VOCABULARY + 8), lora_config=LoraSection(r=4, lora_alpha=8))
    before = weights(wider)
    with pytest.raises(ConfigError, match="holds another base model"):
        wider.load_weights(tmp_path / "whole")
    same(weights(wider), before)
    agent.save_checkpoint(tmp_path / "adapters")
    broader = tiny_agent(hidden=32)
    with pytest.raises(ConfigError, match="belongs to another base model"):
        broader.load_weights(tmp_path / "adapters")


def test_without_optimizer_state_loading_warns_and_starts_fresh(tmp_path):
    agent = tiny_agent(**FAST)
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "policy", save_optimizer=False)
    assert not (tmp_path / "policy" / "optimizer.safetensors").exists()
    fresh = tiny_agent(trained=False)
    fresh.learn(made_up_batch())
    with pytest.warns(UserWarning, match="holds no optimizer state"):
        fresh.load_checkpoint(tmp_path / "policy", load_optimizer=True)
    same(weights(fresh), weights(agent))
    assert moments(fresh) == {}


def test_live_settings_stay_unless_asked(tmp_path):
    saved = {"lr_actor": 1e-2, "lr_critic": 2e-2, "clip_coef": 0.4, "temperature": 0.5}
    tiny_agent(**saved).save_checkpoint(tmp_path / "policy")
    live = {"lr_actor": 3e-3, "lr_critic": 4e-3, "clip_coef": 0.1, "temperature": 1.5}

    def settings(**arguments):
        agent = tiny_agent(**live)
        agent.load_checkpoint(tmp_path / "policy", **arguments)
        return {name: getattr(agent, name) for name in live}

    assert settings() == live
    assert settings(restore_config=True) == saved
    assert settings(restore_hyperparameters=True) == live | {"lr_actor": 1e-2, "lr_critic": 2e-2}


def test_another_lora_config_is_told_field_by_field(tmp_path):
    tiny_agent(lora=LoraSection(r=4, lora_alpha=8)).save_checkpoint(tmp_path / "policy")
    other = tiny_agent(lora=LoraSection(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    before = weights(other)
    with pytest.raises(ConfigError) as caught:
        other.load_checkpoint(tmp_path / "policy")
    message = str(caught.value)
    assert "r: checkpoint 4, here 2" in message
    assert "target_modules: checkpoint" in message
    assert "lora_alpha" not in message
    same(weights(other), before)


def test_reference_and_critic_come_from_where_they_are_asked(tmp_path):
    with_all, without = tiny_agent(), tiny_agent(critic="head", use_separate_reference_adapter=False)
    with_all.save_checkpoint(tmp_path / "all")
    without.save_checkpoint(tmp_path / "actor_only")

    def load(folder, **arguments):
        agent = tiny_agent(trained=False)
        agent.load_weights(tmp_path / folder, **arguments)
        return agent.model

    def equal(model, adapter, other, name):
        return all(
            torch.equal(tensor, other.adapter_state(name)[key])
            for key, tensor in model.adapter_state(adapter).items()
        )

    own = load("all")
    assert equal(own, "reference", with_all.model, "reference")
    assert equal(own, "critic", with_all.model, "critic")
    assert equal(load("all", overwrite_reference_adapter=True), "reference", with_all.model, "actor")
    assert equal(load("all", overwrite_critic_adapter=True), "critic", with_all.model, "actor")
    partial = load("actor_only")
    assert equal(partial, "reference", without.model, "actor")
    assert equal(partial, "critic", tiny_agent(trained=False).model, "critic")  # stays at its fresh start


@pytest.mark.parametrize(
    "name",
    [
        "actor/adapter_model.safetensors",
        "value_head.safetensors",
        "trainer.json",
        "critic/adapter_config.json",
    ],
)
def test_a_damaged_or_missing_file_is_named(name, tmp_path):
    tiny_agent().save_checkpoint(tmp_path / "policy")
    agent, path = tiny_agent(trained=False), tmp_path / "policy" / name
    before, content = weights(agent), path.read_bytes()
    for damage in (content[:-3] + b"xyz", content[: len(content) // 2], None):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(ArtefactError, match=name):
            agent.load_checkpoint(tmp_path / "policy")
        path.write_bytes(content)
    same(weights(agent), before)


def test_a_file_that_is_no_tensor_file_is_named_even_if_its_hash_fits(tmp_path):
    tiny_agent().save_checkpoint(tmp_path / "policy")
    (tmp_path / "policy" / "value_head.safetensors").write_bytes(b"not tensors")
    write_manifest(tmp_path / "policy", kind="policy")
    with pytest.raises(ArtefactError, match=r"value_head\.safetensors can't be read"):
        tiny_agent().load_checkpoint(tmp_path / "policy")


def test_saving_replaces_the_folder_whole(tmp_path):
    agent = tiny_agent()
    agent.save_checkpoint(tmp_path / "policy", lora_only=False)
    agent.save_checkpoint(tmp_path / "policy", save_optimizer=False)
    assert not (tmp_path / "policy" / "base.safetensors").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


# -- plain PEFT -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "lora",
    [
        LoraSection(r=4, lora_alpha=8),
        LoraSection(r=2, lora_alpha=6, top_layers=1),
        LoraConfig(r=3, lora_alpha=9, target_modules=r".*layers\.1\.mlp\.(up|down)_proj", use_rslora=True),
    ],
    ids=["all", "top", "regex"],
)
def test_adapters_load_with_plain_peft_and_merge(lora, tied, tmp_path):
    """Trained adapter, reloaded by PEFT alone, and merged into the weights: equal logits; values too."""
    agent = tiny_agent(lora=lora, tied=tied, **FAST)
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "policy")
    ids = torch.randint(0, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(0))
    for name in ("actor", "critic", "reference"):
        with agent.select_adapter(name):
            expected = agent.actor(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base(tied=tied), tmp_path / "policy" / name).eval()
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        merged = loaded.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
        if name == "critic":
            head = load_file(tmp_path / "policy" / "value_head.safetensors")
            hidden = merged.get_decoder()(input_ids=ids).last_hidden_state
            values = hidden @ head["weight"].T + head["bias"]
            ours = agent.model.values(agent.model.hidden(ids, (("critic", -1),)))
            torch.testing.assert_close(values.squeeze(-1), ours, rtol=1e-4, atol=1e-4)
    plain = base(tied=tied)
    assert not torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-3)


def test_no_pickle_anywhere():
    """Nothing in the package loads or writes pickles: no torch.load or torch.save, no pickle module."""
    found = []
    for path in Path(llmppo.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [
                    (path.name, name)
                    for name in names
                    if name.split(".")[0] in ("pickle", "dill", "joblib", "cloudpickle", "shelve")
                ]
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.load",
                "torch.save",
                "np.load",
                "pd.read_pickle",
            ):
                found.append((path.name, ast.unparse(node)))
            if isinstance(node, ast.Attribute) and node.attr in ("to_pickle", "read_pickle"):
                found.append((path.name, node.attr))
    assert found == []


def test_a_checkpoint_holds_only_tensors_and_json(tmp_path):
    agent = tiny_agent()
    unlike_adapters(agent, 1)
    agent.save_checkpoint(tmp_path / "policy", lora_only=False)
    assert {path.suffix for path in (tmp_path / "policy").rglob("*") if path.is_file()} == {
        ".json",
        ".safetensors",
    }


@pytest.mark.parametrize(("critic", "adapters", "moments"), [("adapter", 12, 16), ("head", 8, 8)])
def test_a_policy_takes_the_disk_that_the_docs_say(tmp_path, critic, adapters, moments):
    """Bytes for each weight of one adapter, docs/architecture.md; beside them headers, and the value head."""
    agent = tiny_agent(hidden=64, layers=4, lora=LoraSection(r=32, lora_alpha=8), critic=critic)
    agent.learn(made_up_batch())
    agent.save_checkpoint(tmp_path / "policy")
    weights_of_one = sum(weight.numel() for weight in agent.model.adapter_state("actor").values())
    sizes = {path.name: 0 for path in tmp_path.rglob("*.safetensors")}
    for path in tmp_path.rglob("*.safetensors"):
        sizes[path.name] += path.stat().st_size
    assert sizes["adapter_model.safetensors"] == pytest.approx(adapters * weights_of_one, rel=0.05)
    assert sizes["optimizer.safetensors"] == pytest.approx(moments * weights_of_one, rel=0.1)
