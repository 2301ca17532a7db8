"""Training from scratch on tasks whose best return and true values are known."""

from dataclasses import replace

import pytest

from llmppo.testing.probes import PROBES, digit_tokenizer, run_probe


def check(probe, result):
    """Greedy play is optimal on every task; values are close, as the sampled policy still errs now and then."""
    assert result.mean_return == pytest.approx(probe.best_return, abs=0.01)
    assert result.values == pytest.approx(dict(probe.values), abs=0.15)


@pytest.mark.parametrize("name", PROBES)
def test_the_policy_reaches_the_optimum_and_the_critic_the_truth(name):
    check(PROBES[name], run_probe(PROBES[name]))


def test_credit_crosses_turns_on_the_token_axis_too():
    """Replies of two tokens; the observation between turns must not cut the recursion."""
    probe = replace(PROBES["delayed reward"], values={"0": 1.0})
    check(probe, run_probe(probe, advantage_granularity="token", max_output_tokens=2))


def test_a_critic_head_on_the_actors_trunk_learns_too():
    probe = PROBES["conditional target"]
    check(probe, run_probe(probe, critic="head"))


def test_without_a_future_the_delayed_reward_is_not_learnt():
    """gamma = 0 hides the last turn's reward from the first reply: the probe above can fail."""
    result = run_probe(replace(PROBES["delayed reward"], iterations=20), gamma=0.0, gae_lambda=0.0)
    rewards = [row["rollout/reward_mean"] for row in result.agent.history]
    assert sum(rewards) / len(rewards) < 0.4


def test_without_bootstrapping_a_cut_counts_as_an_end():
    """The same task with terminal truncation: the last turn is worth 1 and the one before 1.5, not 2."""
    result = run_probe(PROBES["truncated walk"], truncation="terminal")
    assert result.values["01010"] == pytest.approx(1.0, abs=0.2)
    assert result.values["010"] == pytest.approx(1.5, abs=0.25)


def test_the_digits_are_their_own_ids():
    tokenizer = digit_tokenizer()
    assert tokenizer.encode("0192") == [0, 1, 9, 2]
    assert tokenizer.decode([3, 0]) == "30"
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 10
