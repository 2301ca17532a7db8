"""Collecting: batched turn by turn, reproducible from the specs, and summarised."""

import numpy as np
import pytest

from llmppo.engines.hf import HFEngine, hf_forward
from llmppo.envs.harness import RolloutHarness
from llmppo.envs.templates import end_token_ids
from llmppo.testing import CountdownEnv, ScriptedEngine, tiny_model, tiny_tokenizer
from llmppo.trajectories.collect import binomial_interval, collect_episodes, dataset_rows, rollout_metrics
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn
from llmppo.trajectories.parquet import write_episodes

TOKENIZER = tiny_tokenizer()
ENDS = sorted(end_token_ids(TOKENIZER))
MODEL = tiny_model(seed=3)


def specs(n, split="train", iteration=1):
    return [EpisodeSpec(seed=5, split=split, iteration=iteration, index=index) for index in range(n)]


def make_harness(turns=3):
    env = CountdownEnv(turns)
    return RolloutHarness.local(env, TOKENIZER, max_turns=3, max_output_tokens=6)


def model_engine(**settings):
    return HFEngine(hf_forward(MODEL), ENDS, logit_bias={ENDS[0]: 4.0}, **settings)


def test_all_active_episodes_generate_together():
    lengths = iter([1, 3, 2])
    engine = ScriptedEngine(lambda request: [TOKENIZER.encode("7")[0], ENDS[0]], ENDS)
    batches, generate, harnesses = [], engine.generate, []

    def recorded(requests, *, greedy=False):
        batches.append(len(requests))
        return generate(requests, greedy=greedy)

    def make():
        harnesses.append(make_harness(next(lengths)))
        return harnesses[-1]

    engine.generate = recorded
    reported = []
    episodes = collect_episodes(make, engine, specs(3), progress=lambda done, of: reported.append((done, of)))
    assert batches == [3, 2, 1]
    assert [len(episode.turns) for episode in episodes] == [1, 3, 2]
    assert [episode.spec.index for episode in episodes] == [0, 1, 2]
    assert [episode.episode_return for episode in episodes] == [1.0, 3.0, 2.0]
    assert reported == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert all(harness.env.closed for harness in harnesses)


def test_the_model_is_called_once_for_each_token_of_the_longest_reply():
    engine = model_engine()
    episodes = collect_episodes(make_harness, engine, specs(8))
    expected = 0
    for number in range(3):
        expected += max(e.turns[number].end - e.turns[number].start for e in episodes)
    assert engine.decode_steps == expected


@pytest.mark.parametrize("turns", [1, 3])
def test_caches_go_on_from_turn_to_turn_and_end_with_the_episode(turns):
    engine, seen, known = model_engine(), [], []
    generate = engine.generate

    def recorded(requests, *, greedy=False):
        seen.extend(request.kept for request in requests)
        known.append(
            [request.kept is not None and request.kept.usable(request.token_ids) for request in requests]
        )
        return generate(requests, greedy=greedy)

    def make():
        return RolloutHarness.local(CountdownEnv(turns), TOKENIZER, max_turns=turns, max_output_tokens=6)

    engine.generate = recorded
    collect_episodes(make, engine, specs(4))
    if turns == 1:
        assert seen == [None] * 4
        return
    assert known == [[False] * 4, [True] * 4, [True] * 4]
    assert len({id(kept) for kept in seen}) == 4
    assert all(kept.token_ids == [] and kept.layers == [] for kept in seen)


def test_episodes_depend_on_their_specs_and_not_on_the_shard(tmp_path):
    together = collect_episodes(make_harness, model_engine(), specs(6))
    apart = [*collect_episodes(make_harness, model_engine(), specs(6)[:2])]
    apart += collect_episodes(make_harness, model_engine(chunk_size=3), specs(6)[2:])
    for first, second in zip(together, apart, strict=True):
        assert first.token_ids.tolist() == second.token_ids.tolist()
        assert first.turns == second.turns
        np.testing.assert_allclose(first.sampling_logprobs, second.sampling_logprobs, atol=1e-5)
    assert len({tuple(episode.token_ids) for episode in together}) == 6
    other = collect_episodes(make_harness, model_engine(), specs(1, iteration=2))
    assert other[0].token_ids.tolist() != together[0].token_ids.tolist()
    for name in ("a", "b"):
        write_episodes(tmp_path / name, collect_episodes(make_harness, model_engine(), specs(6)), {})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_logprobs_are_those_of_the_whole_transcript():
    import torch

    (episode,) = collect_episodes(make_harness, HFEngine(hf_forward(MODEL), ENDS), specs(1))
    with torch.inference_mode():
        logits = MODEL(input_ids=torch.tensor([episode.token_ids.tolist()])).logits[0].float()
    every = logits[:-1].log_softmax(-1)[range(len(episode.token_ids) - 1), episode.token_ids[1:]].numpy()
    np.testing.assert_allclose(episode.sampling_logprobs, every[episode.action_mask[1:]], atol=1e-5)


def test_greedy_replies_are_equal_for_equal_transcripts():
    class Same(CountdownEnv):
        def reset(self, seed=None):
            return super().reset(0)

    def make():
        return RolloutHarness.local(Same(2), TOKENIZER, max_turns=2, max_output_tokens=6)

    episodes = collect_episodes(make, model_engine(), specs(3), greedy=True)
    assert len({tuple(episode.token_ids) for episode in episodes}) == 1
    assert len({tuple(e.token_ids) for e in collect_episodes(make, model_engine(), specs(3))}) == 3


class Rows(CountdownEnv):
    dataset_size = 4

    def reset(self, *, row_index, evaluation):
        self.left = self.turns
        return f"{'held-out' if evaluation else 'train'} {row_index}", {}


def observations(**settings):
    def make():
        return RolloutHarness.local(Rows(1), TOKENIZER, max_output_tokens=2)

    engine = ScriptedEngine(lambda request: ENDS[:1], ENDS)
    return [episode.turns[0].observation for episode in collect_episodes(make, engine, specs(6), **settings)]


def test_rows_of_a_dataset_environment():
    assert observations(evaluation=True) == [f"held-out {row}" for row in range(6)]
    assert observations(rows=[3] * 6) == ["train 3"] * 6
    with pytest.raises(ValueError, match="needs `rows` or `batch_size`"):
        observations()
    drawn = observations(batch_size=6)
    rows = dataset_rows(specs(6), 4, batch_size=6, evaluation=False)
    assert drawn == [f"train {row}" for row in rows]
    # Episodes 0..5 of iterations 0 and 1 are twelve in a row: three whole epochs of four rows.
    both = dataset_rows(specs(6, iteration=0), 4, batch_size=6, evaluation=False) + rows
    assert [sorted(both[start : start + 4]) for start in (0, 4, 8)] == [[0, 1, 2, 3]] * 3
    assert dataset_rows(specs(2), None, batch_size=None, evaluation=False) is None


def test_no_specs_give_no_episodes():
    assert collect_episodes(make_harness, model_engine(), []) == []


def episode(index, turns, *, success=False, truncated=False):
    position, made = 2, []
    for tokens, reward, reason, invalid in turns:
        made.append(
            Turn(
                start=position,
                end=position + tokens,
                reward=reward,
                stop_reason=reason,
                invalid=invalid,
                observation="",
                action="",
            )
        )
        position += tokens
    return Episode(
        spec=EpisodeSpec(seed=0, split="train", iteration=1, index=index),
        task_id="t",
        token_ids=np.zeros(position, np.int32),
        sampling_logprobs=np.zeros(position - 2, np.float32),
        turns=tuple(made),
        terminated=not truncated,
        truncated=truncated,
        success=success,
    )


def test_metrics_by_hand():
    episodes = [
        episode(0, [(4, -1.0, StopReason.EOS, True), (2, 3.0, StopReason.LENGTH, False)], success=True),
        episode(1, [(0, 0.0, StopReason.STOP, True)], truncated=True),
        episode(2, [], truncated=True),
        episode(3, [(6, 2.0, StopReason.CONTEXT, False)]),
    ]
    assert rollout_metrics(episodes) == {
        "rollout/episodes": 4,
        "rollout/failed_episodes": 0,
        "rollout/reward_mean": 1.0,  # of 2, 0, 0, 2
        "rollout/reward_std": 1.0,
        "rollout/success_rate": 0.25,
        "rollout/turns_mean": 1.0,
        "rollout/truncated_frac": 0.5,
        "rollout/overlong_prompts": 1,
        "rollout/response_tokens_mean": 3.0,
        "rollout/invalid_action_frac": 0.5,
        "rollout/cut_reply_frac": 0.5,
        "rollout/empty_replies": 1,
    }
    assert rollout_metrics([]) == {"rollout/episodes": 0, "rollout/failed_episodes": 0}
    assert rollout_metrics(episodes[2:3])["rollout/truncated_frac"] == 1.0


@pytest.mark.parametrize(
    ("successes", "n", "interval"),
    [
        (0, 0, (0.0, 1.0)),
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (81, 263, (0.2553, 0.3662)),  # Newcombe 1998, table I, method 3
        (15, 148, (0.0624, 0.1605)),
    ],
)
def test_wilson_interval(successes, n, interval):
    assert binomial_interval(successes, n) == pytest.approx(interval, abs=5e-5)
