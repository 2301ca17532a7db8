"""Gradients of a learn call: equal to a plain re-computation, and independent of how the batch is cut."""

import math
from itertools import product

import pytest
import torch

from llmppo.config import LoraSection
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent
from llmppo.trainer.batch import build_batch
from llmppo.trainer.update import Update

LEVELS = [("token", "token"), ("turn", "turn"), ("turn", "trajectory"), ("turn", "token"), ("token", "turn")]
NORMALIZATIONS = ["token", "sequence", "constant"]
STILL = {"lr_actor": 0.0, "lr_critic": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore:learn step")  # made-up engine log-probs lie far off


def close(ours, expected):
    """Relative 1e-5 of the vector's length."""
    assert (ours - expected).norm() <= 1e-5 * expected.norm() + 1e-9
    assert expected.norm() > 1e-3


def tokens_through(module):
    """Of each call from now on."""
    counts = []
    module.register_forward_pre_hook(lambda _, given: counts.append(given[0][..., 0].numel()))
    return counts


def same_learn_calls(ours, expected):
    """Gradients of the first step and columns of two learn calls: (recorder, columns) each."""
    (recorder, columns), (theirs, other) = ours, expected
    close(recorder.actor[0], theirs.actor[0])
    close(recorder.critic[0], theirs.critic[0])
    for name in ("old_logprobs", "ref_logprobs", "values", "advantages"):
        assert (getattr(columns, name) - getattr(other, name)).abs().max() < 1e-5


def step_gradients(batch, **settings):
    agent = tiny_agent(**({"max_output_tokens": 8} | STILL | settings))
    recorder = StepRecorder(agent)
    metrics = agent.learn(batch)
    return recorder, metrics


# -- independence of the cut ----------------------------------------------------------------------

CUTS = [
    {"micro_batch_size_per_gpu": 1},
    {"micro_batch_size_per_gpu": 4, "max_tokens_per_micro_batch": 40},
    {"micro_batch_size_per_gpu": 2},
    {"micro_batch_size_per_gpu": 3},
    {"max_tokens_per_micro_batch": 25},
    {"chunk_rows": 2},
    {"micro_batch_size_per_gpu": 2, "gradient_checkpointing": True},
]


@pytest.mark.parametrize(
    ("granularity", "level", "normalization", "cuts"),
    [(*levels, normalization, CUTS[:2]) for levels, normalization in product(LEVELS, NORMALIZATIONS)]
    + [("turn", "turn", "token", CUTS[2:]), ("token", "token", "sequence", CUTS[2:])],
)
def test_gradients_do_not_depend_on_the_cut(granularity, level, normalization, cuts):
    common = {
        "advantage_granularity": granularity, "importance_sampling_level": level, "ent_coef": 0.02, "beta": 0.05,
        "loss_normalization": normalization, "turn_ratio_pooling": "mean",
    }  # fmt: skip
    batch = made_up_batch(sampling=True)
    whole, whole_metrics = step_gradients(batch, **common)
    compared = (
        "actor/loss",
        "critic/loss",
        "actor/entropy",
        "actor/ref_kl",
        "actor/grad_norm",
        "critic/grad_norm",
    )
    for cut in cuts:
        parts, metrics = step_gradients(batch, **common, **cut)
        close(parts.actor[0], whole.actor[0])
        close(parts.critic[0], whole.critic[0])
        for name in compared:
            assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("granularity", "level"), LEVELS)
def test_single_step_equals_the_path_of_several_steps(granularity, level, normalization, monkeypatch):
    """Fused or split, with old log-probs and values collected first: the same returns and gradients."""
    common = {
        "advantage_granularity": granularity, "importance_sampling_level": level, "beta": 0.05,
        "loss_normalization": normalization, "micro_batch_size_per_gpu": 3, "truncation": "bootstrap",
    }  # fmt: skip
    batch = made_up_batch(truncated=[True, False, False, True, False, False, True])
    single, _ = step_gradients(batch, **common)
    returns = single.agent.last_outcome.columns.returns
    monkeypatch.setattr(Update, "single_step", property(lambda self: False))
    for fused in (True, False):
        several, _ = step_gradients(batch, fuse_actor_critic_pass=fused, **common)
        close(several.actor[0], single.actor[0])
        close(several.critic[0], single.critic[0])
        torch.testing.assert_close(several.agent.last_outcome.columns.returns, returns, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("critic", ["adapter", "head"])
def test_fused_equals_split_over_several_steps(critic):
    """Three epochs of two steps with learning rates: the same weights in the end."""
    found = []
    for fused in (True, False):
        agent = tiny_agent(
            critic=critic, batch_size=8, mini_batch_size=4, micro_batch_size_per_gpu=2, update_epochs=3,
            lr_actor=1e-3, lr_critic=1e-3, fuse_actor_critic_pass=fused,
        )  # fmt: skip
        recorder = StepRecorder(agent)
        agent.learn(made_up_batch())
        found.append(recorder)
    assert len(found[0].actor) == 6
    for ours, theirs in zip(found[0].actor + found[0].critic, found[1].actor + found[1].critic, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()


def test_frozen_prefix_gives_the_gradients_of_full_passes():
    lora = LoraSection(r=4, lora_alpha=8, top_layers=1)
    batch, found = made_up_batch(), []
    for stored in (True, False):
        agent = tiny_agent(layers=3, lora=lora, update_epochs=2, **STILL)
        assert agent.model.first_adapted == 2
        if not stored:
            agent.model.first_adapted = 0
        recorder = StepRecorder(agent)
        agent.learn(batch)
        found.append((recorder, agent.last_outcome.columns.old_logprobs))
    close(found[0][0].actor[0], found[1][0].actor[0])
    close(found[0][0].critic[0], found[1][0].critic[0])
    assert (found[0][1] - found[1][1]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"critic": "head"},
        {"update_epochs": 2, "fuse_actor_critic_pass": True},
        {"layers": 3, "lora": LoraSection(r=4, lora_alpha=8, top_layers=1)},
        {"truncation": "bootstrap"},
        {"family": "llama"},
        {"family": "cohere"},
    ],
)
def test_a_shared_prefix_gives_the_gradients_of_whole_rows(settings):
    batch = made_up_batch(common=12, truncated=[number % 2 == 0 for number in range(7)])
    found = []
    for share in (True, False):
        agent = tiny_agent(**(STILL | {"beta": 0.1, "micro_batch_size_per_gpu": 3} | settings))
        assert agent.model.shares_prefixes
        agent.model.prefixes = share
        recorder = StepRecorder(agent)
        metrics = agent.learn(batch)
        assert (metrics["perf/shared_frac"] > 0.2) == share
        found.append((recorder, agent.last_outcome.columns))
    same_learn_calls(*found)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"critic": "head"},
        {"update_epochs": 2, "fuse_actor_critic_pass": True},
        {"layers": 3, "lora": LoraSection(r=4, lora_alpha=8, top_layers=1)},
        {"truncation": "bootstrap"},
        {"use_sequence_packing": True},
        {"family": "gemma2"},
        {"family": "cohere"},
    ],
)
def test_the_last_layer_runs_only_where_its_states_are_read(settings):
    batch = made_up_batch(common=12, truncated=[number % 2 == 0 for number in range(7)])
    found = []
    for skip in (True, False):
        agent = tiny_agent(**(STILL | {"beta": 0.1, "micro_batch_size_per_gpu": 3} | settings))
        assert agent.model.skips_unread
        agent.model.reads_apart = skip
        layers = agent.model.layers.layers
        first, last = tokens_through(layers[0].mlp.down_proj), tokens_through(layers[-1].mlp.down_proj)
        recorder = StepRecorder(agent)
        agent.learn(batch)
        assert (sum(last) < 0.7 * sum(first)) == skip or agent.model.first_adapted
        found.append((recorder, agent.last_outcome.columns))
    same_learn_calls(*found)


@pytest.mark.parametrize(
    ("prompts", "settings"),
    [
        ((list(range(1, 9)), list(range(1, 9))), {"gradient_checkpointing": True}),
        ((list(range(1, 9)), list(range(1, 9))), {"use_sequence_packing": True}),
        ((list(range(1, 9)), list(range(1, 9))), {"family": "gemma2"}),  # its windows drop what lies before
        (([1, 2, 3, 4, 5, 6, 7, 8], [2, 2, 3, 4, 5, 6, 7, 8]), {}),
    ],
)
def test_a_prefix_is_shared_only_where_it_can_be(prompts, settings):
    batch = build_batch(
        ["a", "b"],
        [torch.tensor([*prompt, 9 + number]) for number, prompt in enumerate(prompts)],
        [torch.tensor([-1] * 8 + [0])] * 2,
        [[1.0], [0.0]],
        [False, False],
    )
    assert tiny_agent(**(STILL | settings)).learn(batch)["perf/shared_frac"] == 0


def test_a_prefix_ends_before_the_first_state_that_is_read():
    """Equal prompts, and equal first tokens of the replies: the state that predicts the first of them is read in every row."""
    ids = [torch.tensor([1, 2, 3, 4, 5, 6, *reply]) for reply in ((7, 7, 8), (7, 7, 9), (7, 7, 8, 9))]
    turns = [torch.tensor([-1] * 6 + [0] * (len(row) - 6)) for row in ids]
    batch = build_batch(["a", "b", "c"], ids, turns, [[1.0], [0.0], [0.5]], [False] * 3)
    agent = tiny_agent(beta=0.0)
    metrics = agent.learn(batch)
    assert metrics["perf/shared_frac"] == pytest.approx(5 * 2 / (3 * 10))


# -- uneven rests ---------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_smaller_last_mini_batch_is_normalised_by_its_own_units(normalization):
    """Seven episodes in steps of three: each step's gradient is that of a batch of its rows alone."""
    common = {
        "whiten_advantages": False,
        "loss_normalization": normalization,
        "micro_batch_size_per_gpu": 2,
    } | STILL
    batch = made_up_batch()
    recorder, _ = step_gradients(batch, batch_size=8, mini_batch_size=3, **common)
    assert len(recorder.actor) == 3
    agent = tiny_agent(max_output_tokens=8, **common)
    update = tiny_agent(batch_size=8, mini_batch_size=3, **common)._new_update(batch, warmup=False)
    groups = update.mini_batches(0)
    assert [len(group) for group in groups] == [3, 3, 1]
    assert sorted(row for group in groups for row in group) == list(range(7))
    for number, rows in enumerate(groups):
        alone = StepRecorder(agent)
        agent.learn(batch.rows(rows))
        close(recorder.actor[number], alone.actor[0])
        close(recorder.critic[number], alone.critic[0])


def test_no_gradient_survives_a_learn_call():
    agent = tiny_agent(batch_size=8, mini_batch_size=4, micro_batch_size_per_gpu=3)
    agent.learn(made_up_batch())
    assert all(p.grad is None for role in ("actor", "critic") for p in agent.model.parameters(role))
    assert all(parameter.grad is None for parameter in agent.model.peft.parameters())


def test_every_epoch_has_another_order_that_the_seed_and_step_decide():
    def orders(seed, learn_steps):
        agent = tiny_agent(seed=seed, batch_size=8, mini_batch_size=2, update_epochs=2)
        agent.learn_steps = learn_steps
        update = agent._new_update(made_up_batch(), warmup=False)
        return [update.mini_batches(epoch) for epoch in range(2)]

    assert orders(0, 0) == orders(0, 0)
    assert orders(0, 0)[0] != orders(0, 0)[1]
    assert orders(0, 0)[0] != orders(0, 1)[0]
    assert orders(0, 0)[0] != orders(1, 0)[0]


# -- against a plain re-computation ----------------------------------------------------------------


class Plain:
    """The losses of algorithm.md in loops over episodes, turns and tokens, from full logits."""

    def __init__(self, agent, batch):
        self.agent, self.batch, self.config = agent, batch, agent.config
        self.granularity, self.level = agent.config.granularity(3), agent.config.ratio_level(3)
        with torch.no_grad():
            self.old = [self.logps(row, "actor")[0] for row in range(len(batch))]
            self.reference = [self.logps(row, "reference")[0] for row in range(len(batch))]
            self.old_values = [self.values(row) for row in range(len(batch))]
        self.advantages = self.returns = None
        self.estimate()

    def logps(self, row, adapter):
        ids = self.batch.token_ids[row]
        with self.agent.model.router.using(((adapter, -1),)):
            logits = self.agent.model.base(input_ids=ids[None]).logits[0]
        logs = (logits[self.at(row)] / self.agent.temperature).log_softmax(-1)
        return logs.gather(1, ids[self.at(row) + 1][:, None]).squeeze(1), -(logs.exp() * logs).sum(-1)

    def at(self, row):
        return self.batch.positions[row][self.batch.mask[row]]

    def turns(self, row):
        return self.batch.turns[row][self.batch.mask[row]].tolist()

    def values(self, row, last=False):
        route = ((self.agent.model.critic_route, -1),)
        with self.agent.model.router.using(route):
            hidden = self.agent.model.decoder(input_ids=self.batch.token_ids[row][None]).last_hidden_state[0]
        if self.agent.model.critic == "head":
            hidden = hidden.detach()
        return self.agent.model.value_head(hidden[-1:] if last else hidden[self.at(row)]).squeeze(1)

    def units(self, row, level):
        """Token numbers of each unit of an episode."""
        turns = self.turns(row)
        if level == "token":
            return [[n] for n in range(len(turns))]
        if level == "trajectory":
            return [list(range(len(turns)))]
        return [[n for n, turn in enumerate(turns) if turn == wanted] for wanted in dict.fromkeys(turns)]

    def estimate(self):
        """Backward recursion over the units of each episode, then whitening over all of them."""
        config, every = self.config, []
        self.returns, self.raw = [], []
        for row in range(len(self.batch)):
            units, turns = self.units(row, self.granularity), self.turns(row)
            after = 0.0
            if config.truncation == "bootstrap" and self.batch.truncated[row]:
                with torch.no_grad():
                    after = float(self.values(row, last=True))
            advantage = critic_advantage = 0.0
            raw, returns = [], []
            for number in reversed(range(len(units))):
                turn, ends = (
                    turns[units[number][0]],
                    number + 1 == len(units) or turns[units[number + 1][0]] != turns[units[number][0]],
                )
                reward = float(self.batch.rewards[row, turn]) if ends else 0.0
                discount = config.gamma if ends else config.token_gamma
                value = float(self.old_values[row][units[number][0]])  # the state before the unit
                delta = reward + discount * after - value
                advantage = delta + discount * config.gae_lambda * advantage
                critic_advantage = delta + discount * config.critic_gae_lambda * critic_advantage
                after = value
                raw.insert(0, advantage)
                returns.insert(0, critic_advantage + value)
            self.raw.append(raw)
            self.returns.append(returns)
            every += raw
        mean = sum(every) / len(every)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in every) / (len(every) - 1) + 1e-8)
        self.advantages = []
        for row in range(len(self.batch)):
            spread = [0.0] * len(self.turns(row))
            for unit, raw in zip(self.units(row, self.granularity), self.raw[row], strict=True):
                for n in unit:
                    spread[n] = (raw - mean) / deviation
            self.advantages.append(spread)

    def mean_over(self, rows, level, terms):
        """`terms[row]` is a list of one loss a unit."""
        config = self.config
        if config.loss_normalization == "sequence":
            return sum(sum(terms[row]) / len(terms[row]) for row in rows) / len(rows)
        count = sum(len(terms[row]) for row in rows)
        return sum(sum(terms[row]) for row in rows) / count

    def loss(self, rows):
        config = self.config
        surrogate, kl, entropy, value = {}, {}, {}, {}
        for row in rows:
            new, entropies = self.logps(row, "actor")
            gap = new - self.old[row]
            surrogate[row] = []
            for unit in self.units(row, self.level):
                pooled = (
                    gap[unit].sum()
                    if self.level == "turn" and config.turn_ratio_pooling == "sum"
                    else gap[unit].mean()
                )
                ratio = pooled.exp()
                advantage = sum(self.advantages[row][n] for n in unit) / len(unit)
                clipped = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef_high)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped)
                if advantage < 0:
                    loss = torch.minimum(loss, torch.tensor(-config.dual_clip * advantage))
                if self.batch.sampling_logprobs is not None:
                    weights = []
                    for n in unit:
                        sampled = float(self.batch.sampling_logprobs[row, n])
                        known = math.isfinite(sampled)
                        weights.append(
                            min(math.exp(float(self.old[row][n]) - sampled), 2.0) if known else 1.0
                        )
                    loss = loss * (sum(weights) / len(weights))
                surrogate[row].append(loss)
            below = self.reference[row] - new
            kl[row] = list(below.exp() - below - 1)
            entropy[row] = list(entropies)
            values, value[row] = self.values(row), []
            for number, unit in enumerate(self.units(row, self.granularity)):
                v, old, target = values[unit[0]], self.old_values[row][unit[0]], self.returns[row][number]
                moved = old + (v - old).clamp(-config.value_clip, config.value_clip)
                value[row].append(0.5 * torch.maximum((v - target) ** 2, (moved - target) ** 2))
        return (
            self.mean_over(rows, self.level, surrogate)
            + config.beta * self.mean_over(rows, "token", kl)
            - config.ent_coef * self.mean_over(rows, "token", entropy)
            + config.vf_coef * self.mean_over(rows, self.granularity, value)
        )

    def gradients(self, rows, role):
        parameters = self.agent.model.parameters(role)
        found = torch.autograd.grad(self.loss(rows), parameters, allow_unused=True)
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).reshape(-1)
                for p, g in zip(parameters, found, strict=True)
            ]
        )


@pytest.mark.parametrize(
    ("granularity", "level", "normalization", "critic"),
    [
        *(
            (*levels, normalization, "adapter")
            for levels, normalization in product(LEVELS[:3], ["token", "sequence"])
        ),
        ("turn", "turn", "token", "head"),
        ("token", "token", "token", "head"),
    ],
)
def test_every_step_is_a_plain_re_computation(granularity, level, normalization, critic):
    """Two epochs of two steps at large learning rates, all options on: clips, correction, KL and entropy act."""
    batch = made_up_batch(sampling=True, truncated=[True, False, False, False, True, False, False])
    agent = tiny_agent(
        advantage_granularity=granularity, importance_sampling_level=level, loss_normalization=normalization,
        critic=critic, batch_size=8, mini_batch_size=4, micro_batch_size_per_gpu=3, update_epochs=2,
        lr_actor=2e-2, lr_critic=2e-2, gamma=0.9, token_gamma=0.95, gae_lambda=0.8, critic_gae_lambda=0.7,
        truncation="bootstrap", clip_coef=0.1, clip_coef_high=0.2, dual_clip=1.5, kl_clamp=None,
        ent_coef=0.05, beta=0.1, temperature=1.3,
    )  # fmt: skip
    plain = Plain(agent, batch)
    update = agent._new_update(batch, warmup=False)
    groups = [rows for epoch in range(2) for rows in update.mini_batches(epoch)]
    expected = []
    recorder = StepRecorder(agent)
    clip = agent.optimizer.clip

    def compared(config):
        rows = groups[len(expected)]
        expected.append([plain.gradients(rows, role) for role in ("actor", "critic")])
        return clip(config)

    agent.optimizer.clip = compared
    metrics = agent.learn(batch)
    assert metrics["actor/clip_frac"] > 0
    assert metrics["critic/clip_frac"] > 0
    for (actor, critic_gradient), ours, ours_critic in zip(
        expected, recorder.actor, recorder.critic, strict=True
    ):
        assert (ours - actor).norm() < 2e-4 * actor.norm()
        assert (ours_critic - critic_gradient).norm() < 2e-4 * critic_gradient.norm()
