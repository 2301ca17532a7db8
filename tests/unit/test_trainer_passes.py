"""The forward budget: rows through the base model and positions through the output head, counted by hooks."""

from collections import Counter
from itertools import product

import pytest
import torch

from llmppo.config import LoraSection
from llmppo.testing.batches import EPISODES, made_up_batch, tiny_agent
from llmppo.trainer.passes import Passes

ROWS, TOKENS = len(EPISODES), sum(map(sum, EPISODES))


class Meter:
    """Counts rows and tokens forward (recomputation included) and backward in a layer, and head positions."""

    def __init__(self, agent, layer=-1):
        self.rows, self.tokens = Counter(), Counter()
        # The MLP, since a layer that is recomputed calls its parts again, not itself, and the last of them not to its end.
        mlp = agent.model.decoder.layers[layer].mlp
        mlp.register_forward_pre_hook(lambda module, args: self.count("forward", args[0]))
        mlp.register_forward_hook(self.gradient)
        agent.model.head.module.register_forward_hook(self.head)

    def gradient(self, module, args, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: self.count("backward", gradient))

    def count(self, direction, states):
        self.rows[direction] += len(states)
        self.tokens[direction] += states.shape[0] * states.shape[1]

    def head(self, module, args, output):
        self.rows["head"] += output.reshape(-1, output.shape[-1]).shape[0]


def budget(epochs=1, **settings):
    agent = tiny_agent(**({"beta": 0.0, "update_epochs": epochs, "micro_batch_size_per_gpu": 3} | settings))
    meter = Meter(agent)
    agent.learn(made_up_batch())
    return meter.rows["forward"] / ROWS, meter.rows["backward"] / ROWS, meter.rows["head"] / TOKENS


# The head counts twice in a gradient pass: a tile's logits are computed again instead of kept.
@pytest.mark.parametrize(
    ("settings", "forward", "backward", "head"),
    [
        ({}, 2, 2, 2),  # critic and actor, once each
        ({"beta": 0.1}, 3, 2, 3),  # and the reference
        ({"beta": 0.1, "use_separate_reference_adapter": False}, 3, 2, 3),
        ({"epochs": 3}, 2 + 3 * 2, 3 * 2, 1 + 3 * 2),  # old log-probs and values first
        ({"epochs": 3, "beta": 0.1}, 3 + 3 * 2, 3 * 2, 2 + 3 * 2),
        ({"epochs": 3, "fuse_actor_critic_pass": False}, 2 + 3 * 2, 3 * 2, 1 + 3 * 2),
        ({"batch_size": 8, "mini_batch_size": 4}, 4, 2, 3),
        ({"batch_size": 8, "mini_batch_size": 4, "beta": 0.1}, 5, 2, 4),
        ({"critic": "head"}, 2, 1, 2),  # values first, then one trunk pass for both
        ({"critic": "head", "epochs": 3}, 1 + 3, 3, 1 + 3 * 2),
        ({"critic": "head", "epochs": 3, "beta": 0.1}, 2 + 3, 3, 2 + 3 * 2),
        ({"critic_warmup_steps": 1, "beta": 0.1}, 1, 1, 0),  # the critic alone: no output head, no reference
        ({"critic_warmup_steps": 1, "epochs": 3}, 1 + 3, 3, 0),
    ],
    ids=str,
)
def test_forward_budget(settings, forward, backward, head):
    """In units of one pass over every row; head in units of one pass over every action token."""
    assert budget(**settings) == (forward, backward, head)


# Passes over every row: without gradient beside the reference's, and with one.
NEEDED = {
    ("one step", "adapter"): (0, 2),  # the critic's gives the values, the actor's the old log-probs
    ("one step", "head"): (1, 1),  # values first: advantages must be known before the only gradient pass
    ("several steps", "adapter"): (2, 2 * 3),  # old log-probs and values first, then both in each of 3 epochs
    ("several steps", "head"): (1, 3),  # one trunk pass gives both
}


@pytest.mark.parametrize(
    ("beta", "steps", "critic", "recompute", "packing"),
    product((0.0, 0.1), ("one step", "several steps"), ("adapter", "head"), (False, True), (False, True)),
)
def test_passes_of_every_combination(beta, steps, critic, recompute, packing):
    """Token-forwards and token-backwards for each token of a row, and head rows for each action token.

    With one step and an adapter critic: 3 f + 2 b with KL, 2 f + 2 b without; recomputation adds a forward to
    each gradient pass.
    """
    agent = tiny_agent(
        beta=beta, critic=critic, update_epochs=1 if steps == "one step" else 3,
        gradient_checkpointing=recompute, use_sequence_packing=packing,
    )  # fmt: skip
    meter, batch = Meter(agent), made_up_batch()
    agent.learn(batch)
    plain, gradient = NEEDED[steps, critic]
    reference = beta > 0
    computed = sum(batch.lengths) if packing else ROWS * max(batch.lengths)
    assert meter.tokens["forward"] / computed == reference + plain + gradient * (1 + recompute)
    assert meter.tokens["backward"] / computed == gradient
    scored = gradient // (2 if critic == "adapter" else 1)  # gradient passes of the actor
    assert meter.rows["head"] / TOKENS == reference + (steps == "several steps") + 2 * scored
    if (steps, critic, recompute) == ("one step", "adapter", False):
        assert (meter.tokens["forward"] / computed, meter.tokens["backward"] / computed) == (
            3 if beta else 2,
            2,
        )


def test_frozen_layers_run_once_a_batch():
    """With only the top layer adapted, the layer below sees each row once and no gradient."""
    agent = tiny_agent(lora=LoraSection(r=4, lora_alpha=8, top_layers=1), beta=0.1, update_epochs=3)
    below, above = Meter(agent, layer=0), Meter(agent)
    agent.learn(made_up_batch())
    assert below.rows["forward"] == ROWS
    assert below.rows["backward"] == 0
    assert above.rows["forward"] == (3 + 3 * 2) * ROWS


def test_the_head_never_sees_prompts_observations_or_padding():
    """The first learn call of a batch scores as many positions as tokens were sampled, in every pass."""
    agent = tiny_agent(beta=0.0, update_epochs=2, chunk_rows=4)
    sizes = []
    agent.model.head.module.register_forward_hook(lambda module, args, output: sizes.append(output.shape[0]))
    batch = made_up_batch()
    agent.learn(batch)
    assert sum(sizes) == TOKENS * (1 + 2 * 2)
    assert max(sizes) == 4
    assert sum(batch.lengths) > 2 * TOKENS


def test_micro_batches_are_sorted_by_length_and_bounded():
    batch = made_up_batch()
    agent = tiny_agent()
    for rows, tokens in ((2, None), (None, 30), (3, 45), (None, 5)):
        cuts = Passes(agent.model, None, batch, rows, tokens).micro_batches(range(ROWS))
        assert sorted(row for cut in cuts for row in cut) == list(range(ROWS))
        assert [batch.lengths[row] for cut in cuts for row in cut] == sorted(batch.lengths)
        for cut in cuts:
            assert rows is None or len(cut) <= rows
            assert tokens is None or len(cut) == 1 or len(cut) * batch.lengths[cut[-1]] <= tokens
    assert Passes(agent.model, None, batch, None, None).micro_batches([3, 1]) == [[1, 3]]


def test_padding_stays_small_under_a_token_budget():
    """Many episodes of mixed lengths in micro-batches of 256 tokens: under 5 % of what is computed is padding."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 30, (256,), generator=generator).tolist()
    agent = tiny_agent(batch_size=256, max_tokens_per_micro_batch=256, max_turns=1)
    metrics = agent.learn(made_up_batch([(length,) for length in lengths], max_turns=1))
    assert 0 < metrics["perf/padding_frac"] < 0.05
    one = tiny_agent(batch_size=256, max_turns=1)
    assert one.learn(made_up_batch([(n,) for n in lengths], max_turns=1))["perf/padding_frac"] > 0.2


def test_the_bootstrap_value_is_read_after_the_last_token():
    """Where the transcript ends with an observation, that is the state whose value is bootstrapped."""
    agent = tiny_agent(truncation="bootstrap", update_epochs=2, lr_actor=0.0, lr_critic=0.0, gae_lambda=0.0)
    batch = made_up_batch([(2,), (3,)], truncated=[True, False], rewards=[[0.0] * 3] * 2)
    batch.token_ids[0] = torch.cat([batch.token_ids[0], torch.tensor([7, 8, 9])])
    batch.segments[0] = (len(batch.token_ids[0]),)
    agent.learn(batch)
    with torch.no_grad():
        hidden = agent.model.hidden(batch.token_ids[0][None], (("critic", -1),))
        after = float(agent.model.values(hidden)[0, -1])
    returns = agent.last_outcome.columns.returns
    assert returns[0].tolist()[:2] == pytest.approx([after] * 2, rel=1e-4)
    assert returns[1].tolist() == [0.0] * 3
