"""Before the first optimizer step: ratio 1, approximate KL 0, nothing clipped, KL to the reference 0."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig

from llmppo.envs.harness import RolloutHarness
from llmppo.ppo import losses
from llmppo.testing import tiny_tokenizer
from llmppo.testing.batches import EPISODES, made_up_batch, tiny_agent, unlike_adapters
from llmppo.testing.rollouts import CountdownEnv
from llmppo.trainer import update as update_module
from llmppo.trainer.batch import batch_from_episodes
from llmppo.trainer.passes import Passes
from llmppo.training import collect_batch
from llmppo.trajectories.parquet import read_episodes, write_episodes

STILL = {"lr_actor": 0.0, "lr_critic": 0.0}


@pytest.fixture
def log_ratios(monkeypatch):
    """The log-ratios of every action token that a surrogate sees."""
    seen = []
    original = losses.policy_loss

    def recorded(new, old, advantages, mask, turns, **rest):
        seen.append((new - old)[mask].detach())
        return original(new, old, advantages, mask, turns, **rest)

    monkeypatch.setattr(update_module.losses, "policy_loss", recorded)
    return seen


def require_ratio_one(metrics, log_ratios):
    assert (torch.cat(log_ratios).exp() - 1).abs().max() < 1e-5
    assert metrics["actor/ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["actor/approx_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/clip_frac"] == metrics["clipfrac"] == 0.0
    log_ratios.clear()


@pytest.mark.parametrize("micro", range(1, 9))
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_ratio_is_one_for_every_micro_batch_and_temperature(micro, temperature, log_ratios):
    """Two epochs without learning: the ratio compares the gradient pass with the pass without gradient."""
    agent = tiny_agent(
        **STILL, temperature=temperature, batch_size=8, mini_batch_size=8, micro_batch_size_per_gpu=micro,
        update_epochs=2,
    )  # fmt: skip
    metrics = agent.learn(made_up_batch([*EPISODES, (3,)]))
    assert sum(map(len, log_ratios)) == 2 * (sum(map(sum, EPISODES)) + 3)
    require_ratio_one(metrics, log_ratios)


@pytest.mark.parametrize(
    "settings",
    [
        {"fuse_actor_critic_pass": True},
        {"fuse_actor_critic_pass": False},
        {"critic": "head"},
        {"gradient_checkpointing": True},
        {"max_tokens_per_micro_batch": 30},
        {"chunk_rows": 3},
        {"mini_batch_size": 3},
        {"logit_bias": {5: 3.0, 9: -4.0}},
        {"use_separate_reference_adapter": False},
        {"kl_placement": "reward"},
        {"importance_sampling_level": "trajectory"},
        {"advantage_granularity": "token"},
    ],
    ids=str,
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_ratio_is_one_on_every_path(settings, epochs, log_ratios):
    agent = tiny_agent(
        **(STILL | {"batch_size": 8, "update_epochs": epochs, "micro_batch_size_per_gpu": 3} | settings)
    )
    require_ratio_one(agent.learn(made_up_batch()), log_ratios)


@pytest.mark.filterwarnings("ignore:lora_dropout=0.5")
@pytest.mark.parametrize("training_mode", [False, True])
def test_dropout_in_the_lora_config_makes_no_noise(training_mode, log_ratios):
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, task_type="CAUSAL_LM")
    agent = tiny_agent(**STILL, lora=config, update_epochs=2)
    agent.actor.train(training_mode)
    require_ratio_one(agent.learn(made_up_batch()), log_ratios)


@pytest.mark.parametrize("family", ["gemma2", "cohere"])
def test_ratio_is_one_for_capped_and_scaled_logits(family, log_ratios):
    agent = tiny_agent(**STILL, family=family, update_epochs=2)
    require_ratio_one(agent.learn(made_up_batch()), log_ratios)


def test_learning_moves_the_ratio(log_ratios):
    """The invariant can fail: with a learning rate the second epoch sees another policy."""
    agent = tiny_agent(lr_actor=1e-2, update_epochs=2)
    metrics = agent.learn(made_up_batch())
    assert torch.cat(log_ratios).abs().max() > 1e-3
    assert metrics["actor/approx_kl"] > 0


# -- reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("epochs", [1, 2])
def test_kl_to_an_untouched_reference_is_zero(separate, epochs):
    agent = tiny_agent(
        **STILL, trained=False, use_separate_reference_adapter=separate, update_epochs=epochs, beta=0.1
    )
    metrics = agent.learn(made_up_batch())
    assert metrics["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/kl_clamp_frac"] == 0.0


def test_kl_to_the_actors_own_copy_is_zero_and_the_copy_follows_the_tracker():
    agent = tiny_agent(**STILL, beta=0.1)
    assert agent.learn(made_up_batch())["actor/ref_kl"] > 1e-2
    agent.set_reference_policy(0)  # hasn't advanced
    assert agent.learn(made_up_batch())["actor/ref_kl"] > 1e-2
    agent.set_reference_policy(1)
    assert agent.learn(made_up_batch())["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6)
    unlike_adapters(agent, 3)
    agent.set_reference_policy(1)
    assert agent.learn(made_up_batch())["actor/ref_kl"] > 1e-2


def test_a_base_reference_can_not_move():
    agent = tiny_agent(use_separate_reference_adapter=False)
    with pytest.warns(UserWarning, match="the reference is the base model"):
        agent.set_reference_policy(1)


def test_reference_kl_is_the_models_own():
    """Against full logits of base and actor: mean k3 over action tokens."""
    agent, batch = tiny_agent(**STILL, use_separate_reference_adapter=False), made_up_batch()
    total = count = 0.0
    for row, ids in enumerate(batch.token_ids):
        logps = []
        for adapter in ("actor", None):
            with torch.no_grad(), agent.select_adapter(adapter):
                logits = agent.model.base(input_ids=ids[None]).logits[0, :-1]
            logps.append(
                logits.log_softmax(-1)
                .gather(1, ids[1:, None])
                .squeeze(1)[batch.positions[row][batch.mask[row]]]
            )
        gap = (logps[1] - logps[0]).double()
        total, count = total + float((gap.exp() - 1 - gap).sum()), count + len(gap)
    assert agent.learn(batch)["actor/ref_kl"] == pytest.approx(total / count, rel=1e-4)


# -- padding and end tokens -----------------------------------------------------------------------


def test_pad_equal_to_the_end_token_gives_identical_numbers():
    """Transcripts full of the pad id, each ending with it: ids have no special meaning in training."""
    eos, results = 2, []
    batch = made_up_batch()
    for ids in batch.token_ids:
        ids[::2] = eos
        ids[-1] = eos
    batch = made_up_batch_from(batch)
    for pad in (eos, 7, None):
        agent = tiny_agent(
            pad_token_id=pad, lr_actor=1e-3, lr_critic=1e-3, update_epochs=2, micro_batch_size_per_gpu=2
        )
        metrics = agent.learn(batch)
        columns = agent.last_outcome.columns
        results.append(({k: v for k, v in metrics.items() if "time" not in k and "phase" not in k}, columns))
    first_metrics, first = results[0]
    last = torch.stack([first.old_logprobs[row, n - 1] for row, n in enumerate(batch.mask.sum(1).tolist())])
    assert (last < -0.1).all()  # the end token's log-prob is real, not a masked 0
    for metrics, columns in results[1:]:
        assert metrics == first_metrics
        assert torch.equal(columns.old_logprobs, first.old_logprobs)
        assert torch.equal(columns.values, first.values)


def made_up_batch_from(batch):
    """The batch again with targets read from its changed token ids."""
    targets = torch.stack(
        [
            ids[(positions + 1).clamp(max=len(ids) - 1)]
            for ids, positions in zip(batch.token_ids, batch.positions, strict=True)
        ]
    )
    return replace(batch, targets=targets)


def test_the_id_that_pads_rows_changes_nothing(monkeypatch):
    results = []
    for pad in (0, 13):
        monkeypatch.setattr(
            Passes,
            "_ids",
            lambda self, rows, pad=pad: torch.nn.utils.rnn.pad_sequence(
                [self.batch.token_ids[row] for row in rows], batch_first=True, padding_value=pad
            ),
        )
        agent = tiny_agent(lr_actor=1e-3, lr_critic=1e-3, update_epochs=2)
        metrics = agent.learn(made_up_batch())
        results.append({k: v for k, v in metrics.items() if "time" not in k and "phase" not in k})
    assert results[0] == results[1]


def test_engine_log_probs_are_the_trainers():
    """What the in-process engine says of its samples is what learn computes for them."""
    agent = tiny_agent(
        **STILL, temperature=0.7, logit_bias={4: 1.5}, max_output_tokens=6, max_model_len=64, max_turns=1,
    )  # fmt: skip
    prompts = [{"input_ids": torch.tensor([list(range(1, n))])} for n in (3, 6, 9)]
    acted = agent.get_action(prompts)
    metrics = agent.learn(
        (acted.token_ids, acted.action_masks, torch.ones(3)), sampling_logps=acted.sampling_logps
    )
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    assert metrics["rollout/engine_weight_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["rollout/engine_rows_skipped"] == 0


@pytest.mark.parametrize(
    "restriction",
    [{"top_k": 7}, {"top_k": 30, "top_p": 0.6, "min_p": 0.05}, {"top_k": 5, "min_output_tokens": 3}],
)
def test_the_trainer_replays_what_restricted_the_draw(restriction, tmp_path):
    """From the engine through harness and Parquet to learn: the supports make its log-probs the trainer's."""
    agent = tiny_agent(
        **STILL, temperature=0.7, logit_bias={4: 1.5}, max_output_tokens=6, max_model_len=64, max_turns=3,
        batch_size=4, vocab_size=320, **restriction,
    )  # fmt: skip
    tokenizer = tiny_tokenizer()
    agent.listen_for_end_of(tokenizer)
    episodes = collect_batch(
        agent,
        lambda: RolloutHarness.local(
            CountdownEnv(3), tokenizer, max_turns=3, max_output_tokens=6, max_model_len=64,
            min_output_tokens=restriction.get("min_output_tokens"), apply_chat_template=False,
        ),
    )  # fmt: skip
    assert max(len(support) for episode in episodes for support in episode.sampling_supports) > 1
    write_episodes(tmp_path / "shard-0.parquet", episodes, {})
    batch = batch_from_episodes(read_episodes(tmp_path / "shard-0.parquet"), 3)
    metrics = agent.learn(batch)
    assert metrics["rollout/logprob_gap_max"] < 1e-4
    with pytest.warns(UserWarning, match="vllm_max_logprob_gap"):
        unreplayed = agent.learn(replace(batch, supports=None))
    assert unreplayed["rollout/logprob_gap_max"] > 0.01


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize(
    ("family", "tied"), [("gemma2", True), ("cohere", True), ("qwen2", True), ("llama", False)]
)
def test_recorded_log_probs_are_those_of_the_models_full_logits(family, tied, epochs):
    """Soft-capped, scaled, tied and untied heads, at a temperature with a bias, packed into micro-batches."""
    agent = tiny_agent(
        **STILL, family=family, tied=tied, update_epochs=epochs, micro_batch_size_per_gpu=2, temperature=0.7,
        logit_bias={5: 2.0},
    )  # fmt: skip
    batch = made_up_batch()
    agent.learn(batch)
    for row, ids in enumerate(batch.token_ids):
        with torch.no_grad(), agent.select_adapter("actor"):
            logits = agent.model.base(input_ids=ids[None]).logits[0, :-1] / 0.7
        logits[:, 5] += 2.0
        at = batch.positions[row][batch.mask[row]]
        expected = logits.log_softmax(-1)[at].gather(1, ids[at + 1][:, None]).squeeze(1)
        ours = agent.last_outcome.columns.old_logprobs[row][batch.mask[row]]
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("epochs", [1, 2])
def test_supports_apply_to_policy_old_policy_and_reference(epochs, log_ratios):
    """Each token's candidates: its own and two others; a row without a list is over the whole vocabulary."""
    agent = tiny_agent(**STILL, max_turns=1, update_epochs=epochs, beta=0.1, micro_batch_size_per_gpu=1)
    ids = [torch.arange(2, 9), torch.arange(20, 26)]
    masks = [torch.tensor([0, 0, 0, 1, 1, 1]).bool(), torch.tensor([0, 0, 0, 1, 1]).bool()]
    supports = [torch.tensor([[6, 1, 2], [7, 3, -1], [8, -1, -1]]), None]
    metrics = agent.learn((ids, masks, torch.tensor([1.0, 0.0])), sampling_supports=supports)
    require_ratio_one(metrics, log_ratios)
    columns = agent.last_outcome.columns
    for adapter, ours in (("actor", columns.old_logprobs), ("reference", columns.ref_logprobs)):
        with torch.no_grad(), agent.select_adapter(adapter):
            logits = agent.model.base(input_ids=ids[0][None]).logits[0]
        expected = [
            logits[3, [6, 1, 2]].log_softmax(0)[0],
            logits[4, [7, 3]].log_softmax(0)[0],
            torch.tensor(0.0),
        ]
        torch.testing.assert_close(ours[0, :3], torch.stack(expected), rtol=1e-5, atol=1e-5)
        with torch.no_grad(), agent.select_adapter(adapter):
            free = agent.model.base(input_ids=ids[1][None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(ours[1, :2], torch.stack([free[3, 24], free[4, 25]]), rtol=1e-5, atol=1e-5)
