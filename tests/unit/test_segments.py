"""Segments: each runs as a row that knows nothing of those before, while advantages and returns span the episode."""

from itertools import chain

import numpy as np
import pytest
import torch

from llmppo.config import LoraSection
from llmppo.engines.base import Generation
from llmppo.envs.harness import RolloutHarness
from llmppo.errors import TemplateError, TrajectoryError
from llmppo.testing import CountdownEnv, tiny_tokenizer
from llmppo.testing.batches import StepRecorder, tiny_agent
from llmppo.trainer.batch import batch_from_episodes, build_batch
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import read_episodes, write_episodes

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


# -- restarts of the harness ----------------------------------------------------------------------

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
SPEC = EpisodeSpec(seed=0, split="train", iteration=1, index=0)


def prompt(*messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages) + "<|im_start|>assistant\n"  # fmt: skip


def answer(letter):
    ids = [*TOKENIZER.encode(letter), END]
    return Generation(token_ids=ids, logprobs=np.zeros(2, np.float32), stop_reason=StopReason.EOS)


def play(turns, **settings):
    harness = RolloutHarness.local(
        CountdownEnv(9), TOKENIZER, max_turns=turns, system_prompt="Play.", max_output_tokens=4, **settings
    )
    harness.begin(SPEC)
    contexts = []
    for letter in "abcdef"[:turns]:
        request = harness.request()
        if request is None:
            break
        contexts.append(TOKENIZER.decode(request.token_ids))
        assert len(request.token_ids) + request.max_new_tokens <= settings["max_model_len"]
        harness.advance(answer(letter))
    assert harness.request() is None
    return harness.episode(), contexts


def test_a_context_that_is_full_starts_anew_with_the_latest_turns():
    game = play(1, max_model_len=400)[0].turns[0].observation
    first = prompt(("system", "Play."), ("user", game))
    two_turns = TOKENIZER.encode(
        prompt(
            ("system", "Play."), ("user", game), ("assistant", "a"), ("user", "8 left."), ("assistant", "b")
        )
    )
    limit = len(two_turns) + 2  # no room for the second answer
    episode, contexts = play(4, max_model_len=limit, restart_keep_turns=1)
    assert contexts == [
        first,
        prompt(("system", "Play."), ("user", game), ("assistant", "a"), ("user", "8 left.")),
        prompt(("system", "Play."), ("user", game), ("assistant", "b"), ("user", "7 left.")),
        prompt(("system", "Play."), ("user", game), ("assistant", "c"), ("user", "6 left.")),
    ]
    assert len(episode.turns) == 4
    rows = np.split(episode.token_ids, episode.segment_starts[1:])
    assert TOKENIZER.decode(rows[1]) == contexts[2] + "c<|im_end|>"
    assert TOKENIZER.decode(episode.token_ids[episode.action_mask]) == "".join(
        f"{letter}<|im_end|>" for letter in "abcd"
    )
    assert sum(episode.segments) == len(episode.token_ids)
    assert [len(row) for row in rows] == list(episode.segments)
    unrestarted, _ = play(4, max_model_len=limit)
    assert (len(unrestarted.turns), unrestarted.truncated, unrestarted.segment_starts) == (2, True, (0,))


def test_a_restart_that_leaves_no_room_ends_the_episode():
    short = len(TOKENIZER.encode(prompt(("system", "Play."), ("user", "Game 3: 9 left.")))) + 8
    episode, contexts = play(4, max_model_len=short, restart_keep_turns=3)
    assert (len(contexts), episode.truncated, episode.segment_starts) == (1, True, (0,))


def test_segments_are_stored_and_trained_on(tmp_path):
    episode, _ = play(4, max_model_len=75, restart_keep_turns=1)
    assert len(episode.segments) > 1
    write_episodes(tmp_path / "a", [episode], {})
    (read,) = read_episodes(tmp_path / "a")
    assert read.segment_starts == episode.segment_starts
    running = tiny_agent(vocab_size=320, max_turns=4, lr_actor=0.0, lr_critic=0.0)
    assert batch_from_episodes([read], 4).segments == [episode.segments]
    assert running.learn(batch_from_episodes([read], 4))["perf/rows_dropped"] == 0


def test_restarts_need_a_chat_template():
    with pytest.raises(TemplateError, match="restart_keep_turns needs apply_chat_template"):
        RolloutHarness.local(CountdownEnv(), TOKENIZER, apply_chat_template=False, restart_keep_turns=1)


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 4), (0, 2)])
def test_episodes_refuse_impossible_segments(starts):
    turn = Turn(
        start=1, end=3, reward=0.0, stop_reason=StopReason.EOS, invalid=False, observation="", action=""
    )
    with pytest.raises(TrajectoryError, match="segments can't start at"):
        Episode(
            spec=SPEC,
            task_id="t",
            token_ids=np.zeros(4, np.int32),
            sampling_logprobs=np.zeros(2, np.float32),
            turns=(turn,),
            terminated=True,
            truncated=False,
            success=False,
            segment_starts=starts,
        )
