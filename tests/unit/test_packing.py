"""Packed rows give the numbers of padded ones: log-probs, values, gradients; and nothing is computed for padding."""

import pytest
import torch

from llmppo.config import LoraSection, PPOConfig
from llmppo.errors import ConfigError
from llmppo.models.packing import BY_ROW
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent
from llmppo.testing.models import tiny_model
from llmppo.trainer.agent import LLMPPO
from llmppo.trainer.passes import Passes

TOP = {"lora": LoraSection(r=4, lora_alpha=8, top_layers=1)}


def batch():
    """Ragged episodes, two of which have segments; one segment is a single token."""
    made = made_up_batch(truncated=[True] * 7)
    made.segments[0], made.segments[2] = (5, 5), (1, 3, 12)
    assert [sum(layout) for layout in made.segments] == made.lengths
    return made


def learn(**settings):
    """What a learn call computes: per-token columns, and the gradients of every optimizer step."""
    agent = tiny_agent(
        **({"lr_actor": 0.0, "lr_critic": 0.0, "beta": 0.05, "truncation": "bootstrap"} | settings)
    )
    recorder = StepRecorder(agent)
    metrics = agent.learn(batch())
    return agent.last_outcome.columns, recorder, metrics


@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2", "cohere"])
@pytest.mark.parametrize(
    "settings",
    [
        {},  # one role a pass
        {"update_epochs": 2},  # all roles in one pass
        {"update_epochs": 2, "micro_batch_size_per_gpu": 3, "gradient_checkpointing": True},
        {"update_epochs": 2, "max_tokens_per_micro_batch": 30, "critic": "head"},
        {"update_epochs": 2, **TOP},
        {"micro_batch_size_per_gpu": 1},
    ],
    ids=str,
)
def test_packed_and_padded_rows_give_equal_numbers(settings, family):
    padded, its_steps, its_metrics = learn(family=family, **settings)
    packed, steps, metrics = learn(family=family, use_sequence_packing=True, **settings)
    for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns"):
        ours, theirs = getattr(packed, name), getattr(padded, name)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)
        assert theirs.abs().max() > 1e-2
    assert len(steps.actor) == len(its_steps.actor)
    for ours, theirs in zip(steps.actor + steps.critic, its_steps.actor + its_steps.critic, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        assert theirs.norm() > 1e-3
    assert metrics["perf/padding_frac"] == 0
    if settings.get("micro_batch_size_per_gpu") != 1:
        assert its_metrics["perf/padding_frac"] > 0


@pytest.mark.parametrize(
    ("attention", "window"),
    [
        ("eager", None),
        ("sdpa", None),
        ("eager", 3),
        ("sdpa", 3),
        pytest.param("flex_attention", None, marks=pytest.mark.slow),  # compiled for each length
    ],
)
# torch 2.13 can't compile flex attention for a CPU once lengths count as dynamic.
@torch._dynamo.config.patch(automatic_dynamic_shapes=False)
def test_every_attention_keeps_packed_rows_apart(attention, window):
    """A window shorter than a row, too."""
    sliding = (
        {}
        if window is None
        else {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    )
    model = tiny_model(hidden=32, heads=2, kv_heads=1, **sliding)
    model.set_attn_implementation(attention)
    agent = LLMPPO(actor_network=model, use_sequence_packing=True)
    rows = torch.arange(3, 20)[None].split((6, 10, 1), dim=1)
    route = ((None, -1),)
    with torch.no_grad():
        apart = torch.cat([agent.model.hidden(row, route) for row in rows], dim=1)
        together = agent.model.hidden(torch.cat(rows, dim=1), route, packed=(6, 10, 1))
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_sdpa_computes_only_the_blocks_of_rows(monkeypatch):
    """Queries meet the keys of their own row, not of the others."""
    agent = tiny_agent(use_sequence_packing=True)
    sizes = []
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, key, *rest, **options: (
            sizes.append((query.shape[2], key.shape[2])) or plain(query, key, *rest, **options)
        ),
    )
    agent.model.hidden(torch.arange(9)[None], (("actor", -1),), packed=(2, 4, 3))
    assert sizes == [(2, 2), (4, 4), (3, 3)] * 2
    assert agent.model.base.config._attn_implementation == BY_ROW


def test_packing_can_be_switched():
    agent = tiny_agent()
    for on, attention in ((True, BY_ROW), (False, "sdpa"), (True, BY_ROW)):
        agent.use_sequence_packing = on
        assert agent.model.base.config._attn_implementation == attention
        assert agent.learn(made_up_batch())["perf/padding_frac"] == 0 or not on


def test_packing_does_not_touch_sampling():
    prompts = [{"input_ids": torch.tensor([[1, 2, 3, 4]])}, {"input_ids": torch.tensor([[5, 6]])}]
    replies = []
    for on in (False, True):
        agent = tiny_agent(use_sequence_packing=on, max_output_tokens=8, max_model_len=32)
        replies.append([row.tolist() for row in agent.get_action(prompts).token_ids])
    assert replies[0] == replies[1]


def test_the_token_budget_counts_no_padding():
    made = batch()
    agent = tiny_agent(use_sequence_packing=True)
    cuts = Passes(agent.model, None, made, None, 30, packing=True).micro_batches(range(len(made)))
    sizes = [sum(made.lengths[row] for row in cut) for cut in cuts]
    assert max(sizes) <= 30
    assert len(cuts) < len(Passes(agent.model, None, made, None, 30).micro_batches(range(len(made))))


def test_a_model_that_mixes_packed_rows_is_refused():
    """A convolution runs over the ends of rows."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, layer_types=["conv", "full_attention"], initializer_range=0.2,
    )  # fmt: skip
    LLMPPO(actor_network=Lfm2ForCausalLM(config))
    with pytest.raises(ConfigError, match="use_sequence_packing: Lfm2ForCausalLM with sdpa attention"):
        LLMPPO(actor_network=Lfm2ForCausalLM(config), use_sequence_packing=True)


def test_packing_needs_positions():
    with pytest.raises(ValueError, match="calc_position_embeddings"):
        PPOConfig(use_sequence_packing=True, calc_position_embeddings=False)
