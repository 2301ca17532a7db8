"""GAE against its O(n^2) definition on both axes, token rewards, and whitening."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmppo.ppo.advantages import gae, token_advantages, token_rewards, turn_advantages, whiten
from llmppo.trainer.batch import build_batch

FLOATS = st.floats(-3, 3, allow_nan=False, width=32)
FRACTIONS = st.sampled_from([0.0, 0.25, 0.9375, 1.0])  # exact in fp32, so fp64 can be held to 1e-9
# An episode: for each turn (reward, values of its tokens). Some turn has a token.
TURN = st.tuples(FLOATS, st.lists(FLOATS, min_size=1, max_size=3))
EPISODES = st.lists(
    st.tuples(st.lists(TURN, min_size=1, max_size=4), FLOATS), min_size=1, max_size=4
)  # with the value after the last token


def definition(rewards, values, discounts, lam, after):
    """A_n = sum over m >= n of (product of discount * lambda from n to m - 1) * delta_m, in Python floats."""
    following = [*values[1:], after]
    deltas = [r + d * v1 - v for r, d, v1, v in zip(rewards, discounts, following, values, strict=True)]
    advantages = []
    for n in range(len(values)):
        total = 0.0
        for m in range(n, len(values)):
            total += math.prod(d * lam for d in discounts[n:m]) * deltas[m]
        advantages.append(total)
    return advantages


class Padded:
    """Episodes on the compressed axis, NaN and senseless turn numbers in the masked slots."""

    def __init__(self, episodes):
        self.episodes = [episode for episode, _ in episodes]
        self.after = torch.tensor([after for _, after in episodes], dtype=torch.float64)
        flat = [[value for _, values in episode for value in values] for episode in self.episodes]
        turns = [
            [turn for turn, (_, values) in enumerate(episode) for _ in values] for episode in self.episodes
        ]
        width = max(map(len, flat))
        self.num_turns = max(map(len, self.episodes))
        self.values = torch.tensor(
            [row + [math.nan] * (width - len(row)) for row in flat], dtype=torch.float64
        )
        self.turns = torch.tensor([row + [10**6] * (width - len(row)) for row in turns])
        self.mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in flat])
        self.rewards = torch.tensor(
            [
                [reward for reward, _ in episode] + [0.0] * (self.num_turns - len(episode))
                for episode in self.episodes
            ],
            dtype=torch.float64,
        )

    def token(self, **changes):
        arguments = {
            "gamma": 1.0,
            "token_gamma": 1.0,
            "lam": 0.95,
            "critic_lam": 0.95,
            "bootstrap": self.after,
        }
        rewards = token_rewards(self.rewards, self.mask, self.turns)
        return token_advantages(
            self.values,
            self.mask,
            self.turns,
            rewards,
            **({**arguments, "length_adaptive_alpha": None} | changes),
        )

    def turn(self, **changes):
        arguments = {"gamma": 1.0, "lam": 0.95, "critic_lam": 0.95, "bootstrap": self.after}
        return turn_advantages(
            self.values,
            self.mask,
            self.turns,
            self.rewards,
            **(arguments | {"reduction": "initial_value"} | changes),
        )


def close(ours, expected):
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=ours.dtype), rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(EPISODES, FRACTIONS, FRACTIONS, FRACTIONS, FRACTIONS)
def test_token_axis_is_the_definition(episodes, gamma, token_gamma, lam, critic_lam):
    padded = Padded(episodes)
    ours = padded.token(gamma=gamma, token_gamma=token_gamma, lam=lam, critic_lam=critic_lam)
    for row, (episode, after) in enumerate(episodes):
        values, rewards, discounts = [], [], []
        for reward, tokens in episode:
            values += tokens
            rewards += [0.0] * (len(tokens) - 1) + [reward]
            discounts += [token_gamma] * (len(tokens) - 1) + [gamma]
        count = len(values)
        close(ours.advantages[row, :count], definition(rewards, values, discounts, lam, after))
        critic = definition(rewards, values, discounts, critic_lam, after)
        close(ours.returns[row, :count], [a + v for a, v in zip(critic, values, strict=True)])
    assert (ours.advantages[~padded.mask] == 0).all()
    assert (ours.returns[~padded.mask] == 0).all()


@settings(max_examples=60, deadline=None)
@given(EPISODES, FRACTIONS, FRACTIONS, FRACTIONS, st.sampled_from(["initial_value", "mean", "final_value"]))
def test_turn_axis_is_the_definition(episodes, gamma, lam, critic_lam, reduction):
    padded = Padded(episodes)
    ours = padded.turn(gamma=gamma, lam=lam, critic_lam=critic_lam, reduction=reduction)
    pick = {
        "initial_value": lambda v: v[0],
        "mean": lambda v: sum(v) / len(v),
        "final_value": lambda v: v[-1],
    }
    for row, (episode, after) in enumerate(episodes):
        values = [pick[reduction](tokens) for _, tokens in episode]
        rewards, discounts = [reward for reward, _ in episode], [gamma] * len(episode)
        advantages = definition(rewards, values, discounts, lam, after)
        critic = definition(rewards, values, discounts, critic_lam, after)
        close(ours.unit_advantages[row, : len(episode)], advantages)
        close(ours.unit_returns[row, : len(episode)], [a + v for a, v in zip(critic, values, strict=True)])
        owner = padded.turns[row][padded.mask[row]].tolist()
        close(ours.advantages[row][padded.mask[row]], [advantages[turn] for turn in owner])
        assert (ours.unit_advantages[row, len(episode) :] == 0).all()


@settings(max_examples=40, deadline=None)
@given(EPISODES)
def test_rewards_sum_to_the_return(episodes):
    padded = Padded(episodes)
    rewards = token_rewards(padded.rewards, padded.mask, padded.turns)
    torch.testing.assert_close(rewards.sum(1), padded.rewards.sum(1))
    assert (rewards[~padded.mask] == 0).all()


def test_hand_worked_turns():
    """gamma 0.5, lambda 0.5, V = 1, 2, rewards 1, 4: delta = 1, 2 and A = 1 + 0.25 * 2, 2."""
    padded = Padded([([(1.0, [1.0, 9.0]), (4.0, [2.0])], 0.0)])
    ours = padded.turn(gamma=0.5, lam=0.5, critic_lam=0.5)
    assert ours.unit_advantages.tolist() == [[1.5, 2.0]]
    assert ours.unit_returns.tolist() == [[2.5, 4.0]]
    assert ours.advantages.tolist() == [[1.5, 1.5, 2.0]]


def test_hand_worked_tokens():
    """Two turns of tokens; the discount is 0.5 after token 1, the end of turn 0, and 0.1 after token 0."""
    padded = Padded([([(1.0, [0.0, 0.0]), (4.0, [2.0])], 0.0)])
    ours = padded.token(gamma=0.5, token_gamma=0.1, lam=1.0, critic_lam=1.0)
    # A_2 = 4 - 2; A_1 = (1 + 0.5 * 2) + 0.5 * 2 = 3; A_0 = 0 + 0.1 * 3
    torch.testing.assert_close(ours.advantages, torch.tensor([[0.3, 3.0, 2.0]], dtype=torch.float64))


@pytest.mark.parametrize("axis", ["turn", "token"])
def test_a_reward_in_turn_two_reaches_turn_one(axis):
    padded = Padded([([(0.0, [0.0, 0.0]), (1.0, [0.0])], 0.0)])
    ours = getattr(padded, axis)(lam=1.0, critic_lam=1.0, gamma=0.9)
    assert ours.advantages[0, 0] == pytest.approx(0.9)
    assert ours.returns[0].tolist() == pytest.approx([0.9, 0.9, 1.0])


@pytest.mark.parametrize("axis", ["turn", "token"])
def test_observations_change_nothing(axis):
    """The same replies with other prompts and observations around them: equal advantages."""
    rewards, found = [[0.5, -1.0, 2.0]], []
    for prompt, gap in ((1, 0), (4, 1), (2, 5)):
        labels = [-1] * prompt + [0, 0] + [-1] * gap + [1] + [-1] * gap + [2, 2, 2] + [-1] * gap
        batch = build_batch(["one"], [torch.arange(len(labels))], [torch.tensor(labels)], rewards, [False])
        values = torch.tensor([[0.1, -0.2, 0.4, 0.7, 0.0, -0.5]])
        common = {"gamma": 0.9, "lam": 0.8, "critic_lam": 1.0, "bootstrap": torch.zeros(1)}
        if axis == "turn":
            found.append(
                turn_advantages(
                    values, batch.mask, batch.turns, batch.rewards, reduction="initial_value", **common
                )
            )
        else:
            found.append(
                token_advantages(
                    values,
                    batch.mask,
                    batch.turns,
                    token_rewards(batch.rewards, batch.mask, batch.turns),
                    token_gamma=0.99,
                    length_adaptive_alpha=None,
                    **common,
                )
            )
    for other in found[1:]:
        assert torch.equal(found[0].advantages, other.advantages)
        assert torch.equal(found[0].returns, other.returns)


@pytest.mark.parametrize("axis", ["turn", "token"])
def test_nothing_earned_and_nothing_expected_is_no_advantage(axis):
    padded = Padded([([(0.0, [0.0, 0.0]), (0.0, [0.0])], 0.0), ([(0.0, [0.0])], 0.0)])
    ours = getattr(padded, axis)()
    assert not ours.advantages.any()
    assert not ours.returns.any()
    assert torch.equal(whiten(ours.unit_advantages, ours.unit_mask), ours.unit_advantages)


@pytest.mark.parametrize("axis", ["turn", "token"])
def test_bootstrap_continues_after_the_last_token(axis):
    """A truncated episode is worth what the critic says of its last state, discounted once."""
    episode = [(1.0, [0.5]), (2.0, [0.25])]
    cut, ended = Padded([(episode, 4.0)]), Padded([(episode, 0.0)])
    arguments = {"gamma": 0.5, "lam": 1.0, "critic_lam": 1.0}
    with_bootstrap = getattr(cut, axis)(**arguments).returns[0].tolist()
    assert with_bootstrap == pytest.approx([1 + 0.5 * (2 + 0.5 * 4), 2 + 0.5 * 4])
    assert getattr(ended, axis)(**arguments).returns[0].tolist() == pytest.approx([2.0, 2.0])


def test_lambda_of_policy_and_critic_are_separate():
    padded = Padded([([(1.0, [0.5]), (2.0, [0.25])], 0.0)])
    for axis in (padded.turn, padded.token):
        ours = axis(lam=0.0, critic_lam=1.0)
        assert ours.advantages[0].tolist() == pytest.approx([1 + 0.25 - 0.5, 2 - 0.25])  # TD errors
        assert ours.returns[0].tolist() == pytest.approx([3.0, 2.0])  # Monte Carlo returns


def test_length_adaptive_lambda_follows_the_rows_action_tokens():
    """alpha 0.5: lambda is 1 - 1/(0.5 * 4) = 0.5 for four tokens, and 0 for one or two."""
    episodes = [([(1.0, [0.0] * 3), (1.0, [0.0])], 0.0), ([(1.0, [0.0, 0.0])], 0.0), ([(1.0, [0.0])], 0.0)]
    padded = Padded(episodes)
    ours = padded.token(lam=0.95, critic_lam=1.0, length_adaptive_alpha=0.5)
    for row, lam in enumerate((0.5, 0.0, 0.0)):
        rewards = token_rewards(padded.rewards, padded.mask, padded.turns)[row][padded.mask[row]].tolist()
        count = len(rewards)
        close(ours.advantages[row, :count], definition(rewards, [0.0] * count, [1.0] * count, lam, 0.0))
    assert ours.returns[0, 0] == 2.0  # the critic's lambda stays its own


def test_a_turn_without_tokens_passes_its_reward_back():
    """Replies of turns 0 and 2, none in turn 1: its reward still belongs to what turn 0 did."""
    mask, turns = torch.ones(1, 2).bool(), torch.tensor([[0, 2]])
    rewards, values = torch.tensor([[1.0, 10.0, 100.0]]), torch.tensor([[0.25, 0.5]])
    ours = turn_advantages(
        values, mask, turns, rewards, gamma=0.5, lam=1.0, critic_lam=1.0, reduction="initial_value",
        bootstrap=torch.zeros(1),
    )  # fmt: skip
    assert ours.returns.tolist() == [[1 + 0.5 * 10 + 0.25 * 100, 100.0]]
    assert ours.unit_mask.tolist() == [[True, False, True]]
    assert token_rewards(rewards, mask, turns).tolist() == [[11.0, 100.0]]


@pytest.mark.parametrize(
    ("acted", "expected"),
    [
        ([0], [-0.5 * 7.0 + 1.0]),  # the last turn said nothing and was punished
        ([0, 1], [1.0 + 0.5 * 2 - 0.25 * 7.0, 2 - 0.5 * 7.0]),
    ],
)
def test_a_last_turn_without_tokens_keeps_its_reward(acted, expected):
    rewards = torch.zeros(1, 4)
    rewards[0, : len(acted)] = torch.tensor([1.0, 2.0])[: len(acted)]
    rewards[0, len(acted)] = -7.0
    mask, turns = torch.ones(1, len(acted)).bool(), torch.tensor([acted])
    ours = turn_advantages(
        torch.full((1, len(acted)), 0.25), mask, turns, rewards, gamma=0.5, lam=1.0, critic_lam=1.0,
        reduction="initial_value", bootstrap=torch.zeros(1),
    )  # fmt: skip
    assert ours.returns[0].tolist() == pytest.approx(expected)
    assert token_rewards(rewards, mask, turns).sum() == rewards.sum()


def test_turns_that_never_came_do_not_discount_the_bootstrap():
    padded = Padded([([(1.0, [0.5])], 4.0), ([(0.0, [0.0])] * 4, 0.0)])
    assert padded.turn(gamma=0.5).unit_returns[0].tolist() == [1 + 0.5 * 4, 0.0, 0.0, 0.0]


def test_a_perfect_critic_at_the_end_of_the_turn_hides_the_advantage_but_not_at_its_start():
    """Why `initial_value` is the default: the state before the turn can't know what the turn did."""
    padded = Padded([([(1.0, [0.5, 1.0])], 0.0), ([(0.0, [0.5, 0.0])], 0.0)])  # right, wrong
    assert padded.turn(reduction="initial_value").unit_advantages.squeeze(1).tolist() == [0.5, -0.5]
    assert padded.turn(reduction="final_value").unit_advantages.squeeze(1).tolist() == [0.0, 0.0]


def test_lambda_as_one_number_a_row():
    rewards, values = torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.zeros(2, 2)
    ours = gae(
        rewards, values, torch.ones(2, 2), torch.tensor([0.25, 1.0]), torch.ones(2, 2).bool(), torch.zeros(2)
    )
    assert ours.tolist() == [[0.25, 1.0], [1.0, 1.0]]


# -- whitening ------------------------------------------------------------------------------------


def test_whitening_uses_every_unit_and_the_unbiased_deviation():
    values = torch.tensor([[1.0, 2.0, math.nan], [6.0, 1e9, math.nan]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    ours = whiten(values, mask)
    deviation = math.sqrt(((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2)
    expected = [-2 / deviation, -1 / deviation, 3 / deviation]
    torch.testing.assert_close(ours[mask], torch.tensor(expected))
    assert ours[~mask].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_units_stay_as_they_are(count):
    values, mask = torch.tensor([[3.0, 3.5]]), torch.zeros(1, 2).bool()
    mask[0, :count] = True
    assert torch.equal(whiten(values, mask), values)


def test_two_units():
    half = math.sqrt(0.5)
    torch.testing.assert_close(
        whiten(torch.tensor([[1.0, 5.0]]), torch.ones(1, 2).bool()), torch.tensor([[-half, half]])
    )


def test_a_constant_stays_as_it_is():
    values = torch.tensor([[2.0, 2.0 + 1e-7, 2.0]])
    assert torch.equal(whiten(values, torch.ones(1, 3).bool()), values)
