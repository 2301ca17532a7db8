"""Segments: each runs as a row that knows nothing of those before, while advantages and returns span the episode."""

from itertools import chain

import pytest
import torch

from llmppo.config import LoraSection
from llmppo.errors import TrajectoryError
from llmppo.testing.batches import StepRecorder, tiny_agent
from llmppo.trainer.batch import build_batch

# Per episode its segments, per segment the turn of each token (-1: not sampled).
EPISODES = [
    [[-1, -1, 0, 0], [-1, -1, -1, 1, 1, -1, 2]],
    [[-1, 0, 0, -1, 1]],
    [[-1, -1, -1, 0], [-1, 1], [-1, -1, 2, 2, 2]],
]
REWARDS = torch.tensor([[0.0, 0.5, 1.0], [1.0, -1.0, 0.0], [0.0, 0.0, 2.0]])
GENERATOR = torch.Generator().manual_seed(0)
IDS = [
    [torch.randint(0, 48, (len(segment),), generator=GENERATOR) for segment in episode]
    for episode in EPISODES
]


def agent(**settings):
    return tiny_agent(
        **({"lr_actor": 0.0, "lr_critic": 0.0, "beta": 0.05, "max_output_tokens": 8} | settings)
    )


def joined():
    """The episodes as arguments of `learn`."""
    ids = [torch.cat(episode) for episode in IDS]
    turns = [torch.tensor(list(chain(*episode)))[1:] for episode in EPISODES]
    segments = [[len(segment) for segment in episode] for episode in EPISODES]
    segments[1] = None
    return ((ids, [row >= 0 for row in turns], REWARDS), turns), {"episode_segments": segments}


def learn(running):
    arguments, keywords = joined()
    metrics = running.learn(*arguments, **keywords)
    return running.last_outcome, metrics


@pytest.mark.parametrize("truncation", ["terminal", "bootstrap"])
@pytest.mark.parametrize("settings", [{}, {"lora": LoraSection(r=4, lora_alpha=8, top_layers=1)}])
@pytest.mark.parametrize("cut", [{}, {"micro_batch_size_per_gpu": 1}, {"update_epochs": 2}])
def test_a_segment_gives_the_numbers_that_it_gives_alone(cut, settings, truncation):
    outcome, _ = learn(agent(truncation=truncation, **settings, **cut))
    pieces = [
        (ids, torch.tensor(turns).clamp(max=0), turns)
        for episode, rows in zip(EPISODES, IDS, strict=True)
        for turns, ids in zip(episode, rows, strict=True)
    ]
    alone = agent(**settings, update_epochs=2)  # two steps, so that old log-probs are collected
    alone.learn(
        build_batch(
            [f"piece {number}" for number in range(len(pieces))],
            [ids for ids, _, _ in pieces],
            [torch.where(torch.tensor(turns) >= 0, 0, -1) for _, _, turns in pieces],
            torch.zeros(len(pieces), 3),
            [False] * len(pieces),
        )
    )
    for name in ("old_logprobs", "ref_logprobs", "values"):
        ours = getattr(outcome.columns, name)[outcome.batch.mask]
        theirs = getattr(alone.last_outcome.columns, name)[alone.last_outcome.batch.mask]
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


def test_returns_span_the_episode():
    """Monte Carlo: turn k's return is the sum of all later rewards, whichever segment they fall in."""
    outcome, _ = learn(agent(gae_lambda=1.0, advantage_granularity="turn"))
    later = REWARDS.flip(1).cumsum(1).flip(1)
    expected = later.gather(1, outcome.batch.turns)[outcome.batch.mask]
    torch.testing.assert_close(outcome.columns.returns[outcome.batch.mask], expected, rtol=1e-4, atol=1e-5)


def test_the_value_after_a_cut_is_that_of_the_last_segment():
    batch = build_batch(
        ["a", "b"],
        [torch.cat(IDS[0]), IDS[0][1]],
        [torch.tensor(list(chain(*EPISODES[0]))), torch.tensor(EPISODES[0][1])],
        [[0.0, 0.0, 0.0]] * 2,
        [True, True],
        segments=[[4, 7], None],
    )
    running = agent(truncation="bootstrap", gae_lambda=1.0, advantage_granularity="turn")
    running.learn(batch)
    returns = running.last_outcome.columns.returns  # without rewards: the value after the last token
    torch.testing.assert_close(returns[0, :5], returns[1, 0].expand(5), rtol=1e-4, atol=1e-5)
    assert abs(float(returns[0, 0])) > 1e-4


def test_gradients_with_segments_do_not_depend_on_the_cut():
    found = []
    for cut in ({}, {"micro_batch_size_per_gpu": 1}, {"max_tokens_per_micro_batch": 12}):
        running = agent(**cut)
        recorder = StepRecorder(running)
        learn(running)
        found.append((recorder.actor[0], recorder.critic[0]))
    for actor, critic in found[1:]:
        assert (actor - found[0][0]).norm() <= 1e-5 * found[0][0].norm()
        assert (critic - found[0][1]).norm() <= 1e-5 * found[0][1].norm()
    assert found[0][0].norm() > 1e-3


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([4, 6], r"segments of \[4, 6\] tokens for 11 tokens"),
        ([11, 0], r"segments of \[11, 0\]"),
        ([3, 8], "first token of a segment can't be sampled"),
    ],
)
def test_layouts_that_cannot_be_are_refused(segments, message):
    with pytest.raises(TrajectoryError, match=f"^a: .*{message}"):
        build_batch(
            ["a"],
            [torch.cat(IDS[0])],
            [torch.tensor(list(chain(*EPISODES[0])))],
            [[0.0, 0.0, 0.0]],
            [False],
            segments=[segments],
        )
