"""Odd batches are counted and don't crash; numbers that aren't finite raise before anything changes."""

import math

import numpy as np
import pytest
import torch

from llmppo.errors import ConfigError, NonFiniteError, TrajectoryError
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent, weights
from llmppo.trainer.batch import build_batch

ROWS = [(2, 1), (3,), (1, 1, 1)]
FAST = {"lr_actor": 1e-2, "lr_critic": 1e-2}

pytestmark = pytest.mark.filterwarnings("ignore:learn step")  # made-up engine log-probs lie far off


def unchanged(agent, before):
    after = weights(agent)
    assert all(torch.equal(before[name], after[name]) for name in before)


def finite(metrics):
    return all(value is None or math.isfinite(value) for value in metrics.values())


# -- odd batches ----------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [1, 4])
@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_a_row_without_action_tokens_is_dropped_and_counted(micro, granularity):
    """An over-long prompt: its episode has tokens but nothing was sampled. The others learn as without it."""
    common = {"advantage_granularity": granularity, "micro_batch_size_per_gpu": micro, "batch_size": 4} | FAST
    with_row, without = tiny_agent(**common), tiny_agent(**common)
    recorders = StepRecorder(with_row), StepRecorder(without)
    metrics = with_row.learn(made_up_batch([*ROWS, ()]))
    without.learn(made_up_batch(ROWS))
    assert metrics["perf/rows_dropped"] == 1.0
    assert finite(metrics)
    for role in ("actor", "critic"):
        ours, theirs = (getattr(recorder, role)[0] for recorder in recorders)
        assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("granularity", ["turn", "token"])
@pytest.mark.parametrize("episodes", [[(0, 2), (2, 0), (1, 0, 2)], [(1,)], [(5, 1, 1)], [(1,)] * 3])
def test_turns_without_tokens_and_single_episodes(episodes, granularity):
    """Zero-token replies, one episode, one token: everything stays finite, weights move."""
    agent = tiny_agent(**FAST, advantage_granularity=granularity, update_epochs=2, mini_batch_size=2)
    before = weights(agent)
    metrics = agent.learn(made_up_batch(episodes))
    assert finite(metrics)
    assert metrics["perf/rows_dropped"] == 0.0
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(agent).items())
    assert all(torch.isfinite(tensor).all() for tensor in weights(agent).values())


@pytest.mark.parametrize("episodes", [[(), ()], []])
def test_a_batch_without_any_action_token_changes_nothing_but_the_counter(episodes):
    agent = tiny_agent(**FAST)
    before = weights(agent)
    metrics = agent.learn(made_up_batch(episodes))
    assert metrics["perf/rows_dropped"] == len(episodes)
    assert metrics["perf/optimizer_steps"] == 0.0
    assert (agent.learn_steps, agent.last_outcome) == (1, None)
    assert agent.critic_explained_variance(made_up_batch(episodes)) is None
    unchanged(agent, before)


def test_masked_truncated_episodes_give_no_loss_and_are_counted():
    common = FAST | {"truncation": "mask"}
    masked, plain = tiny_agent(**common), tiny_agent(**common)
    recorders = StepRecorder(masked), StepRecorder(plain)
    batch = made_up_batch(ROWS, truncated=[False, True, False])
    assert masked.learn(batch)["perf/rows_masked"] == 1.0
    plain.learn(batch.rows([0, 2]))
    assert torch.equal(recorders[0].actor[0], recorders[1].actor[0])
    before = weights(masked)
    metrics = masked.learn(made_up_batch(ROWS, truncated=[True] * 3))
    assert (metrics["perf/rows_masked"], metrics["perf/optimizer_steps"]) == (3.0, 0.0)
    unchanged(masked, before)


def test_senseless_numbers_in_masked_slots_change_nothing():
    """Positions, targets, turns and engine log-probs of slots that hold no token."""
    results = []
    for garbage in (0, 10**9):
        batch = made_up_batch(sampling=True)
        for field in (batch.positions, batch.targets, batch.turns):
            field[~batch.mask] = garbage
        batch.sampling_logprobs[~batch.mask] = math.nan if garbage == 0 else 1e9
        agent = tiny_agent(**FAST, update_epochs=2, mini_batch_size=4, ent_coef=0.1)
        metrics = agent.learn(batch)
        results.append(
            ({k: v for k, v in metrics.items() if "time" not in k and "phase" not in k}, weights(agent))
        )
    assert results[0][0] == results[1][0]
    assert all(torch.equal(tensor, results[1][1][name]) for name, tensor in results[0][1].items())


# -- numbers that aren't finite --------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"update_epochs": 2}, {"normalize_returns": True}, {"critic_warmup_steps": 1}], ids=str
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("granularity", ["turn", "token"])
def test_a_bad_reward_names_its_episode_alone(settings, bad, granularity):
    rewards = [[1.0, 0.0, 0.0], [0.5, bad, 0.0], [0.0, 1.0, 2.0]]
    batch = made_up_batch([(2, 1), (1, 1), (1, 1, 1)], rewards=rewards)
    agent = tiny_agent(**(FAST | settings), advantage_granularity=granularity)
    before, steps = weights(agent), agent.learn_steps
    with pytest.raises(NonFiniteError) as caught:
        agent.learn(batch)
    assert "episode-1" in str(caught.value)
    assert "episode-0" not in str(caught.value)
    assert "episode-2" not in str(caught.value)
    unchanged(agent, before)
    assert agent.learn_steps == steps
    assert not agent.optimizer.adamw.state
    assert (agent.running_returns.count, agent.running_returns.mean) == (0.0, 0.0)
    assert finite(agent.learn(made_up_batch(ROWS)))  # and the agent still works


@pytest.mark.parametrize(
    ("adapter", "parameter"), [("actor", -1), ("critic", -1), ("reference", -1), ("actor", 1), ("critic", 1)]
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_weights_that_are_nan_raise_before_anything_changes(adapter, parameter, epochs):
    """Parameter 1 belongs to the queries: torch's CPU attention turns NaN queries into 0, so only gradients tell."""
    agent = tiny_agent(**FAST, update_epochs=epochs, beta=0.1)
    agent.model.router.parameters(adapter)[parameter].data[0, 0] = math.nan
    before = weights(agent)
    with pytest.raises(NonFiniteError, match="episode-"):
        agent.learn(made_up_batch(ROWS))
    for name, tensor in weights(agent).items():
        assert torch.equal(torch.nan_to_num(tensor, nan=9.0), torch.nan_to_num(before[name], nan=9.0))
    assert not agent.optimizer.adamw.state


def test_a_gradient_that_is_not_finite_raises_too(monkeypatch):
    agent = tiny_agent(**FAST)
    before = weights(agent)
    agent.model.parameters("critic")[0].register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match="the critic gradient norm is"):
        agent.learn(made_up_batch(ROWS))
    unchanged(agent, before)


def test_a_sampled_token_outside_its_support_names_the_episode():
    agent = tiny_agent(max_turns=1)
    ids, masks = [torch.arange(6), torch.arange(6)], [torch.tensor([0, 0, 0, 1, 1]).bool()] * 2
    supports = [torch.tensor([[4, 9], [5, -1]]), torch.tensor([[4, 9], [7, 8]])]
    with pytest.raises(NonFiniteError, match="row 1") as caught:
        agent.learn((ids, masks, torch.ones(2)), sampling_supports=supports)
    assert "row 0" not in str(caught.value)


# -- arguments that can't be right ----------------------------------------------------------------


def test_shapes_that_do_not_fit_are_told():
    agent = tiny_agent(max_turns=1)
    ids = [torch.arange(6)]
    with pytest.raises(ConfigError, match="episode 0: the action mask has 6 entries for 6 tokens"):
        agent.learn((ids, [torch.ones(6)], torch.ones(1)))
    with pytest.raises(TrajectoryError, match="row 0: turn 1 has no reward"):
        agent.learn((ids, [torch.ones(5)], torch.ones(1)), turn_ids=torch.tensor([[0, 0, 1, 1, 1]]))
    with pytest.raises(TrajectoryError, match="one: the first token can't be sampled"):
        build_batch(["one"], [np.arange(3)], [np.array([0, 0, 0])], [[1.0]], [False])
    with pytest.raises(TrajectoryError, match="one: 2 turn ids for 3 tokens"):
        build_batch(["one"], [np.arange(3)], [np.array([-1, 0])], [[1.0]], [False])
    for labels in ([[0, 0, 0, -1, 0]], [[0, 0]]):
        with pytest.raises(ConfigError, match="episode 0: turn_ids needs a turn"):
            agent.learn((ids, [torch.ones(5)], torch.ones(1)), turn_ids=torch.tensor(labels))
    with pytest.raises(TrajectoryError, match="one: turn ids must not decrease"):
        build_batch(["one"], [np.arange(4)], [np.array([-1, 0, 1, 0])], [[1.0, 1.0]], [False])
    with pytest.raises(TrajectoryError, match="row 0: sampling supports of 1 tokens, 5 were sampled"):
        agent.learn((ids, [torch.ones(5)], torch.ones(1)), sampling_supports=[torch.tensor([[1, 2]])])
    assert agent.learn_steps == 0


def test_turn_ids_may_label_tokens_outside_the_mask_and_be_padded():
    """The spec's frame: labels of unsampled tokens don't count, and rows are padded to the longest."""
    found = []
    for labels in (torch.tensor([[-1, 0, 0, 1, -1, -1]]), torch.tensor([[0, 0, 0, 1, 1, -1]])):
        agent = tiny_agent(**FAST, max_turns=2)
        mask = torch.tensor([0, 1, 1, 1, 0]).bool()
        agent.learn(([torch.arange(6)], [mask], torch.tensor([[1.0, 2.0]])), turn_ids=labels)
        assert agent.last_outcome.batch.turns.tolist() == [[0, 0, 1]]
        found.append(weights(agent))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_rows_with_misaligned_engine_log_probs_are_counted_and_weigh_one():
    agent = tiny_agent(max_turns=1, lr_actor=0.0, lr_critic=0.0, vllm_importance_sampling_cap=2.0)
    ids, masks = [torch.arange(6)] * 3, [torch.tensor([0, 0, 0, 1, 1]).bool()] * 3
    logps = [torch.tensor([-30.0, -30.0]), None, torch.tensor([-30.0])]
    recorder = StepRecorder(agent)
    metrics = agent.learn((ids, masks, torch.tensor([1.0, 0.0, 2.0])), sampling_logps=logps)
    assert metrics["rollout/engine_rows_skipped"] == 2.0
    assert metrics["rollout/engine_tokens_missing"] == 4.0
    assert metrics["rollout/engine_cap_frac"] == 1.0  # of the tokens that have one
    assert metrics["rollout/engine_weight_mean"] == 2.0
    assert recorder.actor[0].any()
