"""Every setting of the algorithm has an effect, and the effect is the one described."""

import copy
import math

import pytest
import torch

from llmppo.config import CosineLRScheduleConfig, PPOConfig
from llmppo.errors import ConfigError
from llmppo.testing.batches import EPISODES, StepRecorder, made_up_batch, tiny_agent, weights
from llmppo.trainer.returns import RunningReturns

FAST = {"lr_actor": 1e-2, "lr_critic": 1e-2}
STILL = {"lr_actor": 0.0, "lr_critic": 0.0}

# A setting, a value that isn't the default, and what must be set for it to matter.
EFFECTS = [
    ("mini_batch_size", 3, {}),
    ("update_epochs", 3, {}),
    ("lr_actor", 1e-3, {}),
    ("lr_critic", 1e-3, {}),
    ("adam_betas", (0.5, 0.6), {"update_epochs": 2}),
    ("weight_decay", 0.5, {}),
    ("max_grad_norm", 0.01, {"update_epochs": 2}),
    ("share_grad_clip", True, {"max_grad_norm": 0.01, "update_epochs": 2}),
    ("cosine_lr_schedule_config", {"num_steps": 10, "warmup_proportion": 0.5}, {}),
    ("gamma", 0.5, {}),
    ("token_gamma", 0.5, {"advantage_granularity": "token"}),
    ("gae_lambda", 0.1, {}),
    ("critic_gae_lambda", 0.1, {}),
    ("length_adaptive_lambda", 0.5, {"advantage_granularity": "token"}),
    ("advantage_granularity", "token", {}),
    ("turn_value_reduction", "mean", {}),
    ("turn_value_reduction", "final_value", {}),
    ("truncation", "bootstrap", {}),
    ("truncation", "mask", {}),
    ("whiten_advantages", False, {}),
    ("normalize_returns", True, {"update_epochs": 2}),
    ("importance_sampling_level", "trajectory", {}),
    ("importance_sampling_level", "token", {}),
    ("turn_level_clip", False, {}),
    ("turn_ratio_pooling", "mean", {"update_epochs": 2}),
    ("clip_coef", 0.01, {"update_epochs": 4}),
    ("clip_coef_high", 0.9, {"update_epochs": 4, "clip_coef": 0.01}),
    ("dual_clip", 1.01, {"update_epochs": 6, "clip_coef": 0.01, "clip_coef_high": 5.0}),
    ("loss_normalization", "sequence", {}),
    ("loss_normalization", "constant", {"max_grad_norm": 1e9, "adam_betas": (0.0, 0.0)}),
    ("ent_coef", 0.5, {}),
    ("beta", 0.5, {}),
    ("kl_placement", "reward", {"beta": 0.5}),
    ("kl_clamp", 1e-4, {"beta": 5.0}),
    ("target_kl", 1e-6, {"update_epochs": 3}),
    ("vllm_importance_sampling_correction", False, {}),
    ("vllm_importance_sampling_cap", 1.01, {}),
    ("critic", "head", {}),
    ("vf_coef", 5.0, {"max_grad_norm": 1e9}),
    ("vf_clip_coef", None, {"update_epochs": 4, "clip_coef": 0.01}),
    ("vf_clip_coef", 0.001, {"update_epochs": 4}),
    ("critic_warmup_steps", 1, {}),
    ("critic_warmup_epochs", 3, {"critic_warmup_steps": 1}),
    ("use_separate_reference_adapter", False, {"beta": 0.5}),
    ("temperature", 0.5, {}),
    ("logit_bias", {3: 2.0}, {}),
]  # fmt: skip
# How a pass is cut or computed, not what comes out: tests of their own hold the results equal.
EQUAL_RESULTS = {
    "batch_size", "micro_batch_size_per_gpu", "max_tokens_per_micro_batch", "chunk_rows", "fuse_actor_critic_pass",
    "gradient_checkpointing", "cast_logprobs_to_fp32", "calc_position_embeddings", "use_liger_loss", "use_sequence_packing", "max_row_tokens", "activation_offload", "torch_compiler",
}  # fmt: skip
ELSEWHERE = {
    "vllm_max_logprob_gap": "test_a_gap_to_the_engine_warns",
    "vllm_max_clip_fraction": "test_a_gap_to_the_engine_warns",
}


@pytest.mark.filterwarnings("ignore:learn step")
@pytest.mark.parametrize(
    ("name", "value", "with_"), EFFECTS, ids=lambda item: str(item) if not isinstance(item, dict) else ""
)
def test_every_setting_changes_the_weights(name, value, with_):
    batch = made_up_batch(sampling=True, truncated=[True, False, False, False, True, False, False])
    common = FAST | {"batch_size": 8, "max_output_tokens": 8} | with_
    found = []
    for settings in (common, common | {name: value}):
        agent = tiny_agent(**settings)
        agent.learn(batch)
        found.append(weights(agent))
    shared = set(found[0]) & set(found[1])
    assert any(not torch.equal(found[0][key], found[1][key]) for key in shared)
    assert all(torch.isfinite(found[1][key]).all() for key in shared)


def test_no_setting_of_the_algorithm_is_without_effect():
    """A new field of PPOConfig needs a line in EFFECTS, or its place among the others."""
    covered = {name for name, _, _ in EFFECTS} | EQUAL_RESULTS | set(ELSEWHERE)
    assert set(PPOConfig.model_fields) - covered == set()
    assert not covered - set(PPOConfig.model_fields) - {"temperature", "logit_bias"}


# -- stopping, clipping, rates --------------------------------------------------------------------


def test_target_kl_ends_the_epochs():
    steps = {}
    for target in (None, 1e9, 1e-7):
        agent = tiny_agent(**FAST, update_epochs=4, target_kl=target)
        steps[target] = agent.learn(made_up_batch())["perf/optimizer_steps"]
    assert steps == {None: 4, 1e9: 4, 1e-7: 2}  # the first epoch starts at KL 0


@pytest.mark.parametrize("shared", [False, True])
def test_gradients_are_clipped_by_role_or_together(shared):
    agent = tiny_agent(**STILL, max_grad_norm=0.5, share_grad_clip=shared)
    metrics = agent.learn(made_up_batch())
    actor, critic = metrics["actor/grad_norm"], metrics["critic/grad_norm"]
    assert min(actor, critic) > 0.5
    clipped = metrics["actor/grad_norm_clipped"], metrics["critic/grad_norm_clipped"]
    if shared:
        scale = 0.5 / math.hypot(actor, critic)
        assert clipped == (pytest.approx(actor * scale, rel=1e-4), pytest.approx(critic * scale, rel=1e-4))
    else:
        assert clipped == (pytest.approx(0.5, rel=1e-4), pytest.approx(0.5, rel=1e-4))


def test_small_gradients_are_left_alone():
    agent = tiny_agent(**STILL, max_grad_norm=1e6)
    metrics = agent.learn(made_up_batch())
    assert metrics["actor/grad_norm"] == metrics["actor/grad_norm_clipped"] > 0


def test_learning_rates_of_every_learn_call():
    """Warm-up of one call, then two calls of linear warm-up for the critic; the actor has its own clock."""
    schedule = {"num_steps": 5, "warmup_proportion": 0.4, "min_lr_ratio": 0.2}
    agent = tiny_agent(lr_actor=1.0, lr_critic=2.0, critic_warmup_steps=1, cosine_lr_schedule_config=schedule)
    cosine = [0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * x)) for x in (0.0, 1 / 3, 2 / 3, 1.0)]
    critic = [0.5, 1.0, *cosine[:3], 0.2]  # int(5 * 0.4) = 2 calls of warm-up, then 3 of cosine
    actor = [0.0, 1.0, *cosine]  # int(4 * 0.4) = 1 call of warm-up, then 3 of cosine
    for step in range(6):
        assert agent.current_lr == pytest.approx(actor[step])
        assert agent.current_lr_critic == pytest.approx(2 * critic[step])
        assert agent.lr_schedule_step == step
        metrics = agent.learn(made_up_batch([(1,), (2,)]))
        if step:
            assert metrics["actor/lr"] == pytest.approx(actor[step])
        assert metrics["critic/lr"] == pytest.approx(2 * critic[step])
        groups = {group["name"]: group["lr"] for group in agent.optimizer.adamw.param_groups}
        assert groups == {"actor": pytest.approx(actor[step]), "critic": pytest.approx(2 * critic[step])}


def test_changed_learning_rates_reach_the_optimizer():
    """Evolution sets attributes; the next step must use them."""
    agent = tiny_agent(lr_actor=1e-4)
    agent.learn(made_up_batch())
    agent.lr_actor, agent.lr_critic = 3e-3, 4e-3
    agent.apply_lr()
    assert [group["lr"] for group in agent.optimizer.adamw.param_groups] == [3e-3, 4e-3]
    assert agent.learn(made_up_batch())["actor/lr"] == 3e-3
    agent.update_lr((1e-2, None), CosineLRScheduleConfig(num_steps=10), schedule_step=10)
    assert (agent.current_lr, agent.current_lr_critic) == (pytest.approx(1e-3), pytest.approx(1e-3))
    assert [group["lr"] for group in agent.optimizer.adamw.param_groups] == pytest.approx([1e-3, 1e-3])
    agent.update_lr(5e-3)
    assert (agent.current_lr, agent.current_lr_critic, agent.lr_schedule_step) == (5e-3, 5e-3, 0)


def test_a_critic_without_a_rate_takes_the_actors():
    agent = tiny_agent(lr_actor=7e-3, lr_critic=None)
    assert agent.learn(made_up_batch())["critic/lr"] == 7e-3


# -- returns --------------------------------------------------------------------------------------


def test_normalised_returns_keep_the_restored_values():
    """When the statistics move, the head is rescaled: values in reward units stay what they were."""
    agent = tiny_agent(normalize_returns=True, **STILL)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    running = agent.running_returns
    seen = []
    for scale in (1.0, 10.0, 300.0):
        before = running.restore(agent.model.values(hidden)).detach().clone()
        rewards = [[scale * (1 + turn + row) for turn in range(3)] for row in range(7)]
        agent.learn(made_up_batch(rewards=rewards))
        seen.append(agent.last_outcome.columns.returns[made_up_batch().mask])
        torch.testing.assert_close(
            running.restore(agent.model.values(hidden)).detach(), before, rtol=1e-4, atol=1e-2
        )
    assert running.count == 3 * sum(map(len, EPISODES))
    assert running.mean > 10


def test_running_statistics_are_those_of_all_returns():
    running, head = RunningReturns(enabled=True), torch.nn.Linear(3, 1)
    chunks = [torch.randn(n, generator=torch.Generator().manual_seed(n)) * n + n for n in (1, 4, 7)]
    for chunk in chunks:
        running.update(chunk, head)
    every = torch.cat(chunks).double()
    assert running.mean == pytest.approx(float(every.mean()))
    assert running.variance == pytest.approx(float(every.var(correction=0)))
    torch.testing.assert_close(running.restore(running.normalise(chunks[2])), chunks[2])
    off = RunningReturns()
    off.update(chunks[0], head)
    assert off.count == 0.0
    assert torch.equal(off.normalise(chunks[1]), chunks[1])


def test_the_value_loss_is_that_of_normalised_units():
    """Values of 0 before and after the statistics move: half the mean square of return / deviation."""
    agent = tiny_agent(normalize_returns=True, trained=False, **STILL, gae_lambda=1.0)
    rewards = [[100.0 + 3 * row, 5.0, 7.0] for row in range(7)]
    metrics = agent.learn(made_up_batch(rewards=rewards))
    returns = torch.tensor(
        [sum(rewards[row][turn:]) for row, turns in enumerate(EPISODES) for turn in range(len(turns))]
    )
    assert metrics["critic/value_mean"] == 0.0  # in reward units
    assert metrics["critic/loss"] == pytest.approx(
        0.5 * float((returns**2).mean() / returns.var(correction=0)), rel=1e-4
    )


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
def test_truncation_decides_the_value_after_the_episode(truncation):
    agent = tiny_agent(truncation=truncation, **STILL, gae_lambda=1.0, gamma=0.5)
    batch = made_up_batch([(2,), (2,)], truncated=[True, False], rewards=[[1.0, 0, 0]] * 2)
    agent.learn(batch)
    first, second = agent.last_outcome.columns.returns[:, 0].tolist()
    with torch.no_grad():
        after = float(
            agent.model.values(agent.model.hidden(batch.token_ids[0][None], (("critic", -1),)))[0, -1]
        )
    assert first == pytest.approx(1.0 + (0.5 * after if truncation == "bootstrap" else 0.0), rel=1e-4)
    assert second == pytest.approx(1.0)


def test_kl_in_the_reward_lowers_the_returns_by_k1():
    agent = tiny_agent(
        kl_placement="reward", beta=0.5, advantage_granularity="token", **STILL, gae_lambda=1.0
    )
    agent.learn(made_up_batch([(3,)], rewards=[[1.0, 0, 0]]))
    columns = agent.last_outcome.columns
    k1 = (columns.old_logprobs - columns.ref_logprobs)[0]
    expected = [1.0 - 0.5 * float(k1[n:].sum()) for n in range(3)]
    assert columns.returns[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    turn = tiny_agent(kl_placement="reward", beta=0.5, advantage_granularity="turn", **STILL, gae_lambda=1.0)
    turn.learn(made_up_batch([(3,)], rewards=[[1.0, 0, 0]]))
    assert turn.last_outcome.columns.returns[0].tolist() == pytest.approx([expected[0]] * 3, rel=1e-4)


# -- entropy, engine, constant --------------------------------------------------------------------


def test_the_entropy_bonus_raises_entropy():
    """Nothing to gain but entropy: it rises with a bonus, at most to that of the uniform distribution."""
    batch = made_up_batch(rewards=[[0.0] * 3] * 7)
    for bonus, rises in ((1.0, True), (0.0, False)):
        agent = tiny_agent(lr_actor=2e-2, ent_coef=bonus, beta=0.0, trained=False)
        entropies = [agent.learn(batch)["actor/entropy"] for _ in range(8)]
        assert (entropies[0] + 0.05 < entropies[-1] <= math.log(48)) is rises


def test_a_gap_to_the_engine_warns():
    batch = made_up_batch(sampling=True)
    metrics = None
    with pytest.warns(UserWarning, match="the engine's log-probs differ"):
        metrics = tiny_agent(**STILL).learn(batch)
    gap, share = metrics["rollout/logprob_gap_mean"], metrics["rollout/engine_cap_frac"]
    assert gap > 0.1
    assert share > 0.02
    silent = {"vllm_max_logprob_gap": gap + 0.01, "vllm_max_clip_fraction": share + 0.01}
    for name, tight in (("vllm_max_logprob_gap", gap - 0.01), ("vllm_max_clip_fraction", share - 0.01)):
        with pytest.warns(UserWarning, match=name):
            tiny_agent(**STILL, **(silent | {name: tight})).learn(batch)
    tiny_agent(**STILL, **silent).learn(batch)


def test_the_constant_normaliser_is_the_largest_number_of_units():
    """Seven episodes of at most 3 turns or 3 * 8 tokens."""
    for level, units in (("turn", 3), ("token", 24), ("trajectory", 1)):
        common = STILL | {
            "importance_sampling_level": level,
            "beta": 0.0,
            "max_output_tokens": 8,
            "whiten_advantages": False,
        }
        recorders = []
        for normalization in ("constant", "token"):
            agent = tiny_agent(**common, loss_normalization=normalization)
            recorders.append(StepRecorder(agent))
            agent.learn(made_up_batch())
        present = {"turn": sum(map(len, EPISODES)), "token": sum(map(sum, EPISODES)), "trajectory": 7}[level]
        torch.testing.assert_close(
            recorders[0].actor[0] * 7 * units, recorders[1].actor[0] * present, rtol=1e-3, atol=1e-5
        )


# -- settings as a whole --------------------------------------------------------------------------


def test_settings_are_validated_together_and_read_as_attributes():
    agent = tiny_agent()
    agent.clip_coef = 0.3
    assert agent.config.clip_coef == agent.clip_coef == 0.3
    with pytest.raises(ConfigError, match="exceeds batch_size"):
        agent.mini_batch_size = 1000
    assert agent.mini_batch_size is None
    for name, value in (("critic", "head"), ("use_separate_reference_adapter", False)):
        with pytest.raises(ConfigError, match=f"{name} is fixed"):
            setattr(agent, name, value)
    with pytest.raises(ConfigError, match="did you mean `clip_coef`"):
        tiny_agent(clip_coeff=0.1)
    with pytest.raises(AttributeError, match="no attribute 'clip_coeff'"):
        _ = agent.clip_coeff


def test_granularity_is_fixed_by_max_turns_and_not_by_the_batch():
    """One-turn episodes in a multi-turn task stay on the turn axis: one advantage for all tokens of a turn."""
    for max_turns, same in ((3, True), (1, False)):
        agent = tiny_agent(max_turns=max_turns, **STILL)
        agent.learn(made_up_batch([(4,), (3,)], max_turns=max_turns))
        advantages = agent.last_outcome.columns.advantages[0]
        assert bool((advantages == advantages[0]).all()) is same


def test_learning_is_a_function_of_its_inputs():
    """Two agents made alike learn alike, bit by bit, and learning leaves the batch as it was."""
    batch = made_up_batch(sampling=True)
    kept = copy.deepcopy(batch)
    found = []
    for _ in range(2):
        torch.manual_seed(len(found))
        agent = tiny_agent(
            **FAST, update_epochs=2, mini_batch_size=3, vllm_max_logprob_gap=99, vllm_max_clip_fraction=1.0
        )
        agent.learn(batch)
        found.append(weights(agent))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    assert all(torch.equal(a, b) for a, b in zip(batch.token_ids, kept.token_ids, strict=True))
    assert torch.equal(batch.rewards, kept.rewards)
    assert torch.equal(batch.sampling_logprobs.nan_to_num(9), kept.sampling_logprobs.nan_to_num(9))


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_explicit_position_ids_are_the_models_own(family):
    found = []
    for explicit in (True, False):
        agent = tiny_agent(**FAST, family=family, calc_position_embeddings=explicit)
        seen = []
        agent.model.decoder.register_forward_pre_hook(
            lambda module, args, kwargs, seen=seen: seen.append("position_ids" in kwargs), with_kwargs=True
        )
        agent.learn(made_up_batch())
        assert set(seen) == {explicit}
        found.append(weights(agent))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
