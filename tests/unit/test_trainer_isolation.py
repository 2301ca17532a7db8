"""Which weights a learn call may change: a role's step leaves every other weight bit-identical."""

import pytest
import torch
from safetensors.torch import save_file

from llmppo.errors import ArtefactError, ConfigError
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent, unlike_adapters, weights

FAST = {"lr_actor": 1e-2, "lr_critic": 1e-2, "weight_decay": 0.1}


def changed(before, after):
    """Names of the groups (adapter or value head) with a weight that moved."""
    return {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}


def learn(agent, times=2):
    before = weights(agent)
    base = {
        name: tensor.clone() for name, tensor in agent.model.base.state_dict().items() if ".lora_" not in name
    }
    for _ in range(times):
        metrics = agent.learn(made_up_batch())
    for name, tensor in agent.model.base.state_dict().items():
        assert name not in base or torch.equal(tensor, base[name]), name
    return changed(before, weights(agent)), metrics


@pytest.mark.parametrize("epochs", [1, 2])
def test_both_roles_learn_and_the_reference_does_not(epochs):
    moved, _ = learn(tiny_agent(**FAST, update_epochs=epochs))
    assert moved == {"actor", "critic", "value_head"}


@pytest.mark.parametrize("epochs", [1, 2])
def test_stepping_the_critic_leaves_the_actor_bit_identical(epochs):
    moved, _ = learn(tiny_agent(**(FAST | {"lr_actor": 0.0}), update_epochs=epochs))
    assert moved == {"critic", "value_head"}


@pytest.mark.parametrize("epochs", [1, 2])
def test_stepping_the_actor_leaves_the_critic_bit_identical(epochs):
    moved, _ = learn(tiny_agent(**(FAST | {"lr_critic": 0.0}), update_epochs=epochs))
    assert moved == {"actor"}


@pytest.mark.parametrize("critic", ["adapter", "head"])
def test_warm_up_touches_only_the_critic_and_then_the_actor_starts(critic):
    agent = tiny_agent(**FAST, critic=critic, critic_warmup_steps=2, update_epochs=2)
    recorder = StepRecorder(agent)
    moved, metrics = learn(agent)
    assert moved == ({"critic", "value_head"} if critic == "adapter" else {"value_head"})
    assert not any(gradient.any() for gradient in recorder.actor)
    assert metrics["critic/warmup"] == metrics["critic_warmup"] == 1.0
    assert "actor/loss" not in metrics
    assert (agent.critic_warmup_steps_done, agent.in_warmup) == (2, False)
    actor = set(map(id, agent.model.parameters("actor")))
    assert not any(id(parameter) in actor for parameter in agent.optimizer.adamw.state)
    moved, metrics = learn(agent, times=1)
    assert "actor" in moved
    assert metrics["critic/warmup"] == 0.0
    assert agent.critic_warmup_steps_done == 2


def test_warm_up_fits_monte_carlo_returns_and_reports_it():
    """Explained variance before is that of zero values; after enough steps most variance is explained."""
    batch = made_up_batch()
    agent = tiny_agent(
        trained=False, lr_critic=3e-2, critic_warmup_steps=5, critic_warmup_epochs=20, gae_lambda=0.1
    )
    before = weights(agent)
    assert agent.critic_explained_variance(batch) == pytest.approx(0.0, abs=1e-6)
    assert changed(before, weights(agent)) == set()
    first = agent.learn(batch)
    assert first["perf/optimizer_steps"] == 20.0
    returns = agent.last_outcome.columns.returns
    for row, turn in ((0, 0), (2, 1)):
        column = (batch.turns[row] == turn) & batch.mask[row]
        assert returns[row][column][0] == pytest.approx(float(batch.rewards[row, turn:].sum()), rel=1e-5)
    for _ in range(4):
        agent.learn(batch)
    assert first["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert agent.critic_explained_variance(batch) > 0.8
    assert not agent.in_warmup


def test_a_head_critics_loss_does_not_reach_the_actor():
    """Whatever the weight of the value loss, the actor's gradient is the same."""
    found = []
    for vf_coef in (0.0, 50.0):
        agent = tiny_agent(critic="head", vf_coef=vf_coef, lr_actor=0.0, lr_critic=0.0)
        recorder = StepRecorder(agent)
        agent.learn(made_up_batch())
        found.append(recorder)
    assert torch.equal(found[0].actor[0], found[1].actor[0])
    assert not found[0].critic[0].any()
    assert found[1].critic[0].any()


# -- choosing adapters ----------------------------------------------------------------------------


def test_use_adapter_and_select_adapter_route_plain_passes():
    agent, ids = tiny_agent(), torch.arange(6)[None]
    outputs = {}
    for name in ("actor", "critic", "reference", None):
        agent.use_adapter(name)
        outputs[name] = agent.actor(input_ids=ids).logits
    names = list(outputs)
    assert not any(torch.equal(outputs[a], outputs[b]) for a in names for b in names if a != b)
    agent.use_adapter("critic")
    with agent.select_adapter("actor"):
        assert torch.equal(agent.actor(input_ids=ids).logits, outputs["actor"])
    assert torch.equal(agent.actor(input_ids=ids).logits, outputs["critic"])
    with pytest.raises(ConfigError, match="no adapter `judge`"):
        agent.use_adapter("judge")


def test_the_selected_adapter_affects_neither_sampling_nor_training():
    """A leak of the last route into a pass would sample from, or train, another adapter."""
    results = []
    for adapter in (None, "critic", "actor"):
        agent = tiny_agent(**FAST, max_output_tokens=8, max_model_len=64, update_epochs=2)
        agent.use_adapter(adapter)
        reply = agent.get_action({"input_ids": torch.arange(5)[None]}).token_ids[0].tolist()
        agent.learn(made_up_batch())
        results.append((reply, weights(agent)))
    for reply, after in results[1:]:
        assert reply == results[0][0]
        assert changed(results[0][1], after) == set()


def test_the_engine_follows_the_actor_after_every_update():
    """A huge bias towards one token, written into the actor, shows in the next sample: nothing is stale."""
    agent = tiny_agent(max_output_tokens=4, max_model_len=32, trained=False)
    prompt = {"input_ids": torch.arange(5)[None]}
    first = agent.get_action(prompt, training=False).token_ids[0].tolist()
    again = agent.get_action(prompt, training=False).token_ids[0].tolist()
    assert first == again
    for adapter in ("critic", "reference"):
        for parameter in agent.model.router.parameters(adapter):
            parameter.data.add_(5.0)
    assert agent.get_action(prompt, training=False).token_ids[0].tolist() == first
    unlike_adapters(agent, seed=1, scale=2.0)
    assert agent.get_action(prompt, training=False).token_ids[0].tolist() != first


def test_an_existing_adapter_takes_weights_from_a_folder(tmp_path):
    source, target = tiny_agent(), tiny_agent(trained=False)
    source.save_checkpoint(tmp_path / "policy")
    target.update_existing_adapter(tmp_path / "policy", "critic")
    expected = source.model.adapter_state("critic")
    before = weights(target)
    assert all(torch.equal(before[f"critic.{name}"], tensor) for name, tensor in expected.items())
    target.update_existing_adapter(tmp_path / "policy" / "actor", "critic")  # a PEFT directory of its own
    actor = source.model.adapter_state("actor")
    assert all(
        torch.equal(tensor, actor[name]) for name, tensor in target.model.adapter_state("critic").items()
    )
    assert changed(before, weights(target)) == {"critic"}
    save_file({"wrong": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="don't fit"):
        target.update_existing_adapter(tmp_path, "critic")
    with pytest.raises(ConfigError, match="no adapter `judge`"):
        target.update_existing_adapter(tmp_path / "policy", "judge")
    with pytest.raises(ArtefactError, match=r"adapter_model\.safetensors doesn't exist"):
        target.update_existing_adapter(tmp_path / "nowhere", "critic")
