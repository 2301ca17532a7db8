"""The methods around training: modes, training blocks, batch sizes, copies of settings."""

import pytest
import torch

from llmppo.errors import ConfigError
from llmppo.testing.batches import made_up_batch, tiny_agent, weights

PROMPT = {"input_ids": torch.tensor([[5, 6, 7]])}


def test_the_mode_decides_whether_an_action_is_sampled_and_can_be_overruled():
    agent = tiny_agent()
    assert agent.get_action(PROMPT).sampling_logps is not None
    agent.set_training_mode(False)
    assert agent.get_action(PROMPT).sampling_logps is None
    assert agent.get_action(PROMPT, training=True).sampling_logps is not None


def test_a_training_block_counts_steps_and_time():
    agent = tiny_agent()
    agent.set_training_mode(False)
    agent.init_training_step()
    assert agent.training
    agent.finalize_training_step(7)
    assert agent.steps == 7
    first = agent.seconds
    assert first > 0
    agent.init_training_step()
    agent.init_training_step()  # closes the open one
    assert agent.seconds > first
    agent.finalize_training_step(1)
    with pytest.raises(ConfigError, match="without init_training_step"):
        agent.finalize_training_step(1)
    with pytest.raises(ConfigError, match="GraMa"):
        agent.init_training_step(capture_grama=True)


def test_scores_are_appended():
    agent = tiny_agent()
    agent.add_scores([1, 0.5])
    agent.add_scores([2])
    assert agent.scores == [1.0, 0.5, 2.0]


def test_batch_sizes_are_set_together_and_checked():
    agent = tiny_agent()
    agent.configure_batch_size_per_process(12, 3, 8)
    assert (agent.batch_size, agent.micro_batch_size_per_gpu, agent.mini_batch_size) == (12, 3, 8)
    assert agent.gradient_accumulation_steps == 3
    agent.configure_batch_size_per_process(6, None, None)
    assert agent.gradient_accumulation_steps == 1
    with pytest.raises(ConfigError, match="mini_batch_size"):
        agent.configure_batch_size_per_process(4, None, 8)
    assert agent.batch_size == 6
    with pytest.raises(ConfigError, match="group_size=4"):
        agent.configure_batch_size_per_process(8, None, None, group_size=4)


def test_fresh_optimizers_forget_their_moments_only():
    agent = tiny_agent()
    agent.learn(made_up_batch())
    before = weights(agent)
    assert agent.optimizer.adamw.state
    agent.reinit_optimizers()
    assert not agent.optimizer.adamw.state
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(agent).items())
    assert [group["name"] for group in agent.optimizer.adamw.param_groups] == ["actor", "critic"]
    assert agent.get_lr_names() == ["lr_actor", "lr_critic"]


def test_settings_and_counters_can_be_looked_at_and_copied():
    agent, other = tiny_agent(), tiny_agent(seed=5)
    agent.clip_coef = 0.37
    agent.init_training_step()
    agent.finalize_training_step(4)
    agent.add_scores([0.5])
    seen = agent.inspect_attributes(agent)
    assert (seen["clip_coef"], seen["steps"], seen["scores"]) == (0.37, 4, [0.5])
    assert "steps" not in agent.inspect_attributes(agent, input_args_only=True)
    assert "clip_coef" not in agent.inspect_attributes(agent, exclude=["clip_coef"])
    assert agent.copy_attributes(agent, other, exclude=["seed"]) is other
    assert (other.clip_coef, other.steps, other.scores, other.seed) == (0.37, 4, [0.5], 5)
    other.add_scores([1.0])
    assert agent.scores == [0.5]


def test_the_policy_and_the_device():
    agent = tiny_agent()
    assert agent.get_policy() is agent.actor
    ids, rest = agent.to_device([torch.ones(2)], None)
    assert ids[0].device == agent.device
    assert rest is None
    assert agent.preprocess_observation(PROMPT) is PROMPT
