"""Numbers of the closest existing implementation (AgileRL 2.58.0), wherever its definitions are ours.

Each checker compares the output fields of one kind of case and returns their names. A field that isn't
compared stands in `DIFFERENT` with the reason, and `test_every_output_is_accounted_for` holds the two together.
"""

import math

import pytest
import torch
from peer_frame import Frame, by_id, cases, close, vectors
from torch import nn

from llmppo.config import PPOConfig
from llmppo.models.head import TokenScorer
from llmppo.ppo import losses
from llmppo.ppo.advantages import token_advantages, token_rewards, turn_advantages, whiten
from llmppo.ppo.units import pool, unit_mask
from llmppo.trainer.batch import build_batch
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn

REDUCTION = {"mean": "mean", "sum": "sum", "final_value": "last"}

ON_EVERY_TOKEN = "the peer writes a turn's reward on each of its tokens; ours stands on the last one, so that rewards sum to the return"
CUT = "the peer's token GAE restarts at every observation; ours skips observations (compared turn by turn, as rows of their own)"
GAP = "a turn without tokens: the peer drops its reward and bootstraps from 0; ours passes r + gamma V of the next turn on (the other units are compared)"
ENTROPY = "the peer calls the mean of -log p of the sampled tokens entropy; ours is the distribution's"
EMPTY = "the peer divides by zero without action tokens; ours is 0, and such rows are dropped and counted"
ALL_TOKENS = (
    "the peer counts tokens of skipped rows as agreeing; ours leaves them out (compared after rescaling)"
)
PAD_IDS = (
    "the peer finds padding by looking for the pad id and so loses a final end token; our rows carry lengths"
)
NOT_OURS = "a comparison of two paths inside the peer"
MASKED = "the peer transforms masked entries too; ours are 0"
MISALIGNED = "a row whose engine log-probs don't fit: the peer writes its own old log-probs there, ours are missing; the weight is 1 in both"
CONSTANT = "whitening a constant: the peer gives 0; ours leaves it, since there is no deviation to divide by"

# (case id or kind, output field) -> why it isn't compared as it stands.
DIFFERENT = {
    ("gae_turn", "token_rewards"): ON_EVERY_TOKEN,
    ("gae_token", "token_rewards"): ON_EVERY_TOKEN,
    ("gae_turn_gap_turn_g0.95_l0.95_final_value_r", "value_fit"): GAP,
    ("gae_token_ragged_g1.0_l1.0_r", "value_fit"): CUT,
    ("gae_token_empty_row_g0.95_l0.95_w", "value_fit"): CUT,
    ("whiten_constant", "whitened"): CONSTANT,
    ("policy_loss", "entropy"): ENTROPY,
    ("liger_vs_standard", "standard_entropy"): ENTROPY,
    ("liger_vs_standard", "liger_entropy"): ENTROPY,
    ("liger_vs_standard", "max_grad_diff"): NOT_OURS,
    ("policy_all_masked", "policy_loss"): EMPTY,
    ("masks_pad_is_eos", "attention_mask"): PAD_IDS,
}

# Compared, but on an adapted input or on part of the output: the rest of the arithmetic is the same.
ADAPTED = {
    ("gae_token", "returns"): ON_EVERY_TOKEN,
    ("gae_token_ragged_g1.0_l1.0_r", "returns"): CUT,
    ("gae_token_empty_row_g0.95_l0.95_w", "returns"): CUT,
    ("gae_turn_gap_turn_g0.95_l0.95_final_value_r", "returns"): GAP,
    ("whiten", "whitened"): MASKED,
    ("align_sampling", "aligned"): MISALIGNED,
    ("align_sampling", "metrics"): ALL_TOKENS,
}


def check_turn_reduction(case):
    frame = Frame(case)
    for name, how in REDUCTION.items():
        ours = pool(frame.take("values"), frame.mask, frame.turns, "turn", case["inputs"]["num_turns"], how)
        close(ours, case["outputs"][name])
    return set(REDUCTION)


def check_gae_turn(case):
    frame, config, theirs = Frame(case), case["config"], case["outputs"]
    gae = turn_advantages(
        frame.take("values"), frame.mask, frame.turns, torch.tensor(case["inputs"]["rewards_2d"]),
        gamma=config["gamma"], lam=config["gae_lambda"], critic_lam=config["gae_lambda"],
        reduction=config["turn_value_reduction"], bootstrap=torch.zeros(len(frame.mask)),
    )  # fmt: skip
    kept = gae.unit_mask.clone()
    if "gap" in case["id"]:
        kept[0, 0] = False  # the turn before the gap, see GAP
    whitened = (
        whiten(gae.unit_advantages, gae.unit_mask) if config["whiten_advantages"] else gae.unit_advantages
    )
    advantages = frame.expand(whitened.gather(1, frame.turns.clamp(min=0)))
    tokens = frame.where & kept.gather(1, frame.turn_ids.clamp(min=0))
    for ours, name, where in (
        (frame.expand(gae.returns), "returns", tokens),
        (frame.expand(gae.advantages), "advantages_unwhitened", tokens),
        (advantages, "advantages", tokens),
        (gae.unit_returns, "turn_returns", kept),
        (whitened, "turn_advantages", kept),
    ):
        close(ours[where], torch.tensor(theirs[name])[where])
    compared = {"returns", "advantages_unwhitened", "advantages", "turn_returns", "turn_advantages"}
    if "gap" not in case["id"]:
        compare_fit(gae, theirs["value_fit"])
        compared.add("value_fit")
    return compared


def compare_fit(gae, theirs):
    explained = losses.explained_variance(gae.unit_values, gae.unit_returns, gae.unit_mask)
    correlation = losses.correlation(gae.unit_values, gae.unit_returns, gae.unit_mask)
    for ours, value in zip((explained, correlation), theirs, strict=True):
        if ours is None:
            assert value is None or value == 0.0 or math.isnan(value)  # undefined: one unit, or no variance
        else:
            close(ours, value)


def check_gae_token(case):
    """The peer's rewards are fed as they are, and each turn is a row of its own: what is left is GAE."""
    frame, config, theirs = Frame(case), case["config"], case["outputs"]
    rewards = torch.tensor(case["inputs"]["rewards_2d"])
    spread = rewards.gather(1, frame.turn_ids.clamp(min=0))
    rows = [(row, turn) for row in range(len(frame.turn_ids)) for turn in range(frame.num_turns)]
    spans = torch.stack([frame.turn_ids[row] == turn for row, turn in rows])
    width = int(spans.sum(1).max())
    mask = torch.arange(width)[None] < spans.sum(1, keepdim=True)
    values, given = torch.full(mask.shape, math.nan), torch.full(mask.shape, math.nan)
    source = torch.stack([torch.tensor(case["inputs"]["values"])[row] for row, _ in rows])
    values = values.masked_scatter(mask, source[spans])
    given = given.masked_scatter(mask, torch.stack([spread[row] for row, _ in rows])[spans])
    gae = token_advantages(
        values, mask, torch.zeros_like(mask, dtype=torch.long), given,
        gamma=config["gamma"], token_gamma=config["gamma"], lam=config["gae_lambda"],
        critic_lam=config["gae_lambda"], length_adaptive_alpha=None, bootstrap=torch.zeros(len(mask)),
    )  # fmt: skip
    advantages = whiten(gae.advantages, mask) if config["whiten_advantages"] else gae.advantages
    for ours, name in ((gae.returns, "returns"), (advantages, "advantages")):
        peer = torch.stack([torch.tensor(theirs[name])[row] for row, _ in rows])
        close(ours[mask], peer[spans])
    compared = {"returns", "advantages"}
    if frame.num_turns == 1 and "value_fit" in theirs:
        compare_fit(gae, theirs["value_fit"])
        compared.add("value_fit")
    return compared


def check_whiten(case):
    values, mask = torch.tensor(case["inputs"]["values"]), torch.tensor(case["inputs"]["mask"]).bool()
    ours = whiten(torch.where(mask, values, math.nan), mask)
    if case["id"] == "whiten_constant":
        assert torch.equal(ours, values)
        return set()
    close(ours[mask], torch.tensor(case["outputs"]["whitened"])[mask])
    return {"whitened"}


def check_policy_loss(case):
    if case["id"] == "policy_all_masked":
        frame = Frame(case)
        garbage = torch.full(frame.mask.shape, math.nan)
        terms, _ = policy_terms(frame, case["config"], "token", garbage, garbage, garbage, None)
        assert float(terms.loss) == 0.0
        return set()
    frame, config, theirs = Frame(case), case["config"], case["outputs"]
    level = config_of(config).ratio_level(1 if config["ppo_granularity"] == "token" else 3)
    assert level == theirs["resolved_is_level"]
    new = frame.take("log_probs").requires_grad_(True)
    old, reference = frame.take("old_log_probs"), frame.take("reference_log_probs")
    correction = None
    if case["inputs"].get("sampling_log_probs") is not None:
        correction = losses.engine_weights(
            old, frame.take("sampling_log_probs"), frame.mask, config["vllm_cap"]
        )
    terms, count = policy_terms(frame, config, level, new, old, frame.take("advantages"), correction)
    tokens = float(frame.mask.sum())
    kl = losses.kl_loss(new, reference, frame.mask, config["kl_clamp"], frame.mask.float() / tokens)
    loss = terms.loss + config["beta"] * kl.loss
    loss.backward()
    pooled = losses.log_ratio(
        new.detach(), old, frame.mask, frame.turns, level, frame.num_turns, config["turn_ratio_pooling"]
    )
    exists = unit_mask(frame.mask, frame.turns, level, frame.num_turns)
    close(loss.detach(), theirs["policy_loss"])
    close(terms.loss.detach(), theirs["pg_loss"])
    close(frame.expand(new.grad), theirs["grad_log_probs"])
    close(frame.expand(pooled) if level == "token" else pooled, theirs["pooled_log_ratio"])
    shown = frame.expand(exists) if level == "token" else exists
    assert shown.tolist() == theirs["unit_mask"]
    close(kl.metrics["ref_kl"] / tokens, theirs["kl"])
    close(kl.metrics["kl_clamped"] / tokens, theirs["kl_clamp_frac"])
    close((terms.metrics["clip_low"] + terms.metrics["clip_high"]) / count, theirs["clipfrac"])
    compared = set(theirs) - {"entropy"}
    if correction is not None:
        close(correction[frame.mask], torch.tensor(theirs["vllm_ratio"])[frame.where])
        compare_mismatch(
            frame, frame.take("sampling_log_probs"), config["vllm_cap"], theirs["mismatch_metrics"]
        )
    return compared


def config_of(config):
    return PPOConfig(
        importance_sampling_level=config["importance_sampling_level"],
        turn_ratio_pooling=config["turn_ratio_pooling"],
    )


def policy_terms(frame, config, level, new, old, advantages, correction):
    count = float(unit_mask(frame.mask, frame.turns, level, frame.num_turns).sum())
    weights = losses.unit_weights(frame.mask, frame.turns, level, frame.num_turns, "token", count)
    clip = config.get("clip_coef", 0.2)
    return losses.policy_loss(
        new, old, advantages, frame.mask, frame.turns, level=level, num_turns=frame.num_turns,
        pooling=config.get("turn_ratio_pooling", "sum"), clip_low=clip, clip_high=clip, dual_clip=None,
        weights=weights, correction=correction,
    ), count  # fmt: skip


def compare_mismatch(frame, sampling, cap, theirs, share=1.0):
    """Gap statistics; `share` is the share of the peer's tokens that have an engine log-prob (see ALL_TOKENS)."""
    old = frame.take("old_log_probs")
    known = frame.mask & torch.isfinite(sampling)
    gap = (old - sampling)[known]
    weight = losses.engine_weights(old, sampling, frame.mask, cap)[known]
    close(gap.abs().mean() * share, theirs["vllm_is_delta_mean"])
    close(gap.abs().max(), theirs["vllm_is_delta_max"])
    close((gap.exp() - 1 - gap).mean() * share, theirs["vllm_mismatch_kl"])
    close(weight.mean() * share + (1 - share), theirs["vllm_is_ratio_mean"])
    close((gap.exp() >= cap).float().mean() * share, theirs["vllm_is_frac_clamped"])


def check_value_loss(case):
    frame, config, theirs = Frame(case), case["config"], case["outputs"]
    values = frame.take("values").requires_grad_(True)
    level = config["ppo_granularity"]
    count = float(unit_mask(frame.mask, frame.turns, level, frame.num_turns).sum())
    terms = losses.value_loss(
        values, frame.take("old_values"), frame.take("returns"), frame.mask, frame.turns, level=level,
        num_turns=frame.num_turns, reduction=config["turn_value_reduction"], clip=config["clip_coef"],
        weights=losses.unit_weights(frame.mask, frame.turns, level, frame.num_turns, "token", count),
    )  # fmt: skip
    loss = config["vf_coef"] * terms.loss
    loss.backward()
    close(loss.detach(), theirs["value_loss"])
    close(frame.expand(values.grad), theirs["grad_values"])
    return set(theirs)


def check_k3(case):
    reference = torch.tensor(case["inputs"]["reference_log_probs"])
    new, clamp, theirs = (
        torch.tensor(case["inputs"]["log_probs"]),
        case["config"]["kl_clamp"],
        case["outputs"],
    )
    one = torch.ones(1, 1)
    for number, (ref, logp) in enumerate(zip(reference, new, strict=True)):
        ref, logp = ref.reshape(1, 1), logp.reshape(1, 1).clone().requires_grad_(True)
        terms = losses.kl_loss(logp, ref, one.bool(), clamp, one)
        terms.loss.backward()
        close(terms.metrics["ref_kl"], theirs["k3"][number])
        close(terms.loss.detach(), theirs["penalty"][number])
        assert bool(terms.metrics["kl_clamped"]) == theirs["clamped"][number]
        # The peer swaps the clamped reference for the policy itself, so that the gap and its gradient are 0.
        swapped = theirs["penalty_reference"][number]
        close(logp.grad, torch.full((1, 1), 1 - math.exp(swapped - float(logp.detach()))))
    return set(theirs)


def check_vllm_align(case):
    frame, theirs = Frame(case), case["outputs"]
    rows = len(frame.turn_ids)
    turns = torch.cat([torch.full((rows, 1), -1), frame.turn_ids], dim=1)
    batch = build_batch(
        [str(row) for row in range(rows)], [torch.arange(turns.shape[1])] * rows, list(turns),
        torch.zeros(rows, frame.num_turns), [False] * rows, case["inputs"]["sampling_logps"],
    )  # fmt: skip
    assert batch.skipped_sampling_rows == theirs["rows_skipped"]
    # A row that can't be aligned: the peer fills in its old log-probs (weight 1); ours are missing (weight 1).
    old, aligned = frame.take("old_log_probs"), frame.compress(torch.tensor(theirs["aligned"]))
    known = torch.isfinite(batch.sampling_logprobs)
    assert known.any(dim=1).tolist() == [True, False, False]
    close(batch.sampling_logprobs[known], aligned[known])
    close(aligned[~known & frame.mask], old[~known & frame.mask])
    assert (losses.engine_weights(old, batch.sampling_logprobs, frame.mask, 2.0)[~known] == 1).all()
    share = float(known.sum() / frame.mask.sum())
    compare_mismatch(frame, batch.sampling_logprobs, case["config"]["vllm_cap"], theirs["metrics"], share)
    return set(theirs)


def check_resolve(case):
    for layout, rows in case["inputs"]["layouts"].items():
        turns = max((int(mark) for row in rows for mark in row if mark != "."), default=0) + 1
        ours = {
            "granularity": PPOConfig().granularity(turns),
            "is_level": PPOConfig().ratio_level(turns),
            "is_level_no_turn_clip": PPOConfig(turn_level_clip=False).ratio_level(turns),
        }
        assert ours == case["outputs"][layout], layout
    return set(case["outputs"])


def check_liger_vs_standard(case):
    """From hidden states through our tiled output head to the loss and back."""
    frame, config, theirs = Frame(case), case["config"], case["outputs"]
    weight = torch.tensor(case["inputs"]["head_weight"])
    hidden = torch.tensor(case["inputs"]["hidden"]).requires_grad_(True)
    scorer = TokenScorer(PlainHead(weight), tile_rows=3)
    tokens = torch.tensor(case["inputs"]["target_ids"])
    every, _ = scorer(hidden.detach().reshape(-1, hidden.shape[-1]), tokens.reshape(-1))
    close(every.reshape(tokens.shape), theirs["log_probs"])
    logps, _ = scorer(hidden[frame.where], tokens[frame.where])
    new = torch.zeros(frame.mask.shape).masked_scatter(frame.mask, logps)
    old = frame.take("old_log_probs")
    level = config_of(config).ratio_level(1 if config["ppo_granularity"] == "token" else 3)
    correction = None
    if case["inputs"]["sampling_log_probs"] is not None:
        correction = losses.engine_weights(
            old, frame.take("sampling_log_probs"), frame.mask, config["vllm_cap"]
        )
    terms, count = policy_terms(frame, config, level, new, old, frame.take("advantages"), correction)
    share = 1 / float(frame.mask.sum())
    kl = losses.kl_loss(
        new, frame.take("reference_log_probs"), frame.mask, config["kl_clamp"], frame.mask * share
    )
    loss = terms.loss + config["beta"] * kl.loss
    loss.backward()
    clipped = (terms.metrics["clip_low"] + terms.metrics["clip_high"]) / count
    for path in ("standard", "liger"):
        close(loss.detach(), theirs[f"{path}_loss"])
        close(hidden.grad, theirs[f"{path}_grad_hidden"])
        close(terms.loss.detach(), theirs[f"{path}_pg_loss"])
        close(kl.metrics["ref_kl"] * share, theirs[f"{path}_kl"])
        close(kl.metrics["kl_clamped"] * share, theirs[f"{path}_kl_clamp_frac"])
        close(clipped, theirs[f"{path}_clipfrac"])
    return set(theirs) - {"standard_entropy", "liger_entropy", "max_grad_diff"}


class PlainHead:
    """An output head that is a matrix and nothing else."""

    def __init__(self, weight):
        self.module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.module.weight = nn.Parameter(weight, requires_grad=False)
        self.vocabulary = weight.shape[0]

    def logits(self, hidden):
        return self.module(hidden)


def check_masks(case):
    """Our episode keeps the sampled end token, and nothing after it was ever sampled."""
    prompt, theirs = case["config"]["prompt_len"], case["outputs"]
    for row, ids in enumerate(case["inputs"]["ids"]):
        end = prompt + theirs["completion_lengths"][row]
        turn = Turn(
            start=prompt,
            end=end,
            reward=0.0,
            stop_reason=StopReason.EOS,
            invalid=False,
            observation="",
            action="",
        )
        episode = Episode(
            spec=EpisodeSpec(seed=0, split="train", iteration=1, index=row), task_id="",
            token_ids=torch.tensor(ids[:end], dtype=torch.int32).numpy(),
            sampling_logprobs=torch.zeros(end - prompt).numpy(), turns=(turn,),
            terminated=True, truncated=False, success=False,
        )  # fmt: skip
        assert episode.num_action_tokens == theirs["completion_lengths"][row]
        assert episode.action_mask[1:].tolist() == theirs["completion_mask"][row][: end - 1]
        assert not any(theirs["completion_mask"][row][end - 1 :])
        batch = build_batch(["row"], [episode.token_ids], [episode.turn_ids], [[0.0]], [False])
        assert batch.lengths == [end]
        assert batch.targets[0, -1] == ids[end - 1]
    # Row 0 ends with a sampled end token, id 2 = pad: the peer's attention mask is False on it.
    assert theirs["attention_mask"][2] == [True] + [False] * 6
    return {"completion_lengths", "completion_mask"}


CHECKERS = {
    "turn_reduction": check_turn_reduction,
    "gae_turn": check_gae_turn,
    "gae_token": check_gae_token,
    "whiten": check_whiten,
    "policy_loss": check_policy_loss,
    "value_loss": check_value_loss,
    "k3": check_k3,
    "vllm_align": check_vllm_align,
    "resolve": check_resolve,
    "liger_vs_standard": check_liger_vs_standard,
    "masks": check_masks,
}


@pytest.mark.parametrize("name", [case["id"] for case in cases()])
def test_every_output_is_accounted_for(name):
    """Compares what is ours too; every other output field has its reason in `DIFFERENT`."""
    case = by_id(name)
    compared = CHECKERS[case["kind"]](case)
    listed = {field for key, field in DIFFERENT if key in (name, case["kind"])} & set(case["outputs"])
    assert compared | listed == set(case["outputs"])
    assert not compared & listed


def test_the_file_is_complete():
    assert len(cases()) == vectors()["count"] == 47
    known = {case["id"] for case in cases()} | {case["kind"] for case in cases()}
    assert {key for key, _ in [*DIFFERENT, *ADAPTED]} <= known


def test_rewards_sum_to_the_return_where_the_peers_grow_with_length():
    """The peer's returns of four tokens with reward 1 are 4, 3, 2, 1; ours are 1 each."""
    case = by_id("gae_token_reward_multiplied")
    frame = Frame(case)
    rewards = token_rewards(torch.tensor(case["inputs"]["rewards_2d"]), frame.mask, frame.turns)
    assert rewards.sum(1).tolist() == [1.0, 1.0, 1.0]
    gae = token_advantages(
        frame.take("values"), frame.mask, frame.turns, rewards, gamma=1.0, token_gamma=1.0, lam=1.0,
        critic_lam=1.0, length_adaptive_alpha=None, bootstrap=torch.zeros(3),
    )  # fmt: skip
    assert frame.expand(gae.returns).tolist() == (frame.where.float()).tolist()
    assert case["outputs"]["returns"][0] == [0.0, 0.0, 4.0, 3.0, 2.0, 1.0]


def test_granularity_comes_from_max_turns_where_the_peers_comes_from_the_batch():
    """A multi-turn task whose batch happens to hold one-turn episodes: the peer switches to tokens."""
    peer = by_id("granularity_table")["outputs"]["one_turn"]
    assert peer["granularity"] == "token"
    assert PPOConfig().granularity(4) == "turn"


def test_later_rewards_reach_earlier_turns_where_the_peers_are_cut():
    """Same values as the peer's ragged case, reward in the last turn only."""
    case = by_id("gae_token_ragged_g1.0_l1.0_r")
    frame = Frame(case)
    rewards = torch.zeros(3, frame.num_turns)
    rewards[0, 2] = 1.0
    gae = token_advantages(
        torch.zeros_like(frame.take("values")), frame.mask, frame.turns,
        token_rewards(rewards, frame.mask, frame.turns), gamma=1.0, token_gamma=1.0, lam=1.0, critic_lam=1.0,
        length_adaptive_alpha=None, bootstrap=torch.zeros(3),
    )  # fmt: skip
    assert gae.returns[0].tolist() == [1.0] * 6
