"""Policy, entropy, KL and value losses as sums that the caller's normaliser makes means.

A loss over a mini-batch is a sum over its units times weights that are known before the first
micro-batch (`unit_weights`), so gradients don't depend on how the mini-batch is cut.
Clipped surrogate: Schulman et al. 2017 (arXiv:1707.06347), equation 7; dual clip: Ye et al. 2020
(arXiv:1912.09729), equation 5; k1 and k3: Schulman, "Approximating KL divergence" (2020).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmppo.ppo.units import Level, Pooling, pool, spread, unit_mask, zero_masked

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """A summed loss with its gradient, and detached sums for metrics."""

    loss: Tensor
    metrics: dict[str, Tensor]


def unit_weights(
    mask: Tensor,
    turns: Tensor,
    level: Level,
    num_turns: int,
    normalization: Literal["token", "sequence", "constant"],
    total: float,
) -> Tensor:
    """[B, U] weight of each unit in the loss sum.

    `total` is the mini-batch's number of units ("token"), of episodes with units ("sequence") or the
    constant. "sequence" also divides by the units of the episode.
    """
    exists = unit_mask(mask, turns, level, num_turns).float()
    if normalization == "sequence":
        exists = exists / exists.sum(dim=1, keepdim=True).clamp(min=1)
    return exists / max(total, 1.0)


def log_ratio(
    new: Tensor, old: Tensor, mask: Tensor, turns: Tensor, level: Level, num_turns: int, pooling: Pooling
) -> Tensor:
    """[B, U] pooled log-ratio, clamped to +-20; a trajectory's is always the mean over its tokens."""
    how: Pooling = "mean" if level == "trajectory" else pooling
    return pool(new - old, mask, turns, level, num_turns, how).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def engine_weights(old: Tensor, sampling: Tensor, mask: Tensor, cap: float) -> Tensor:
    """[B, N] min(exp(old - sampling), cap), detached; 1 where the engine gave no finite log-prob."""
    known = mask & torch.isfinite(sampling)
    gap = zero_masked(old.detach() - torch.where(known, sampling, old.detach()), known)
    return torch.where(known, gap.clamp(max=MAX_LOG_RATIO).exp().clamp(max=cap), torch.ones_like(gap))


def policy_loss(
    new: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    level: Level,
    num_turns: int,
    pooling: Literal["sum", "mean"],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    weights: Tensor,
    correction: Tensor | None = None,
) -> Terms:
    """Sum of max(-A*rho, -A*clip(rho)) * w over units, times `weights` [B, U].

    `new`, `old`, `advantages`, `correction` are per token [B, N]; advantages and corrections are
    averaged over a unit. With `dual_clip` c, a unit with A < 0 loses at most -c*A.
    """
    exists = unit_mask(mask, turns, level, num_turns)
    logs = log_ratio(new, old, mask, turns, level, num_turns, pooling)
    unit_advantage = pool(advantages, mask, turns, level, num_turns, "mean")
    ratio = logs.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-unit_advantage * ratio, -unit_advantage * clipped)
    if dual_clip is not None:
        loss = torch.where(unit_advantage < 0, torch.minimum(loss, -dual_clip * unit_advantage), loss)
    if correction is not None:
        loss = loss * pool(correction, mask, turns, level, num_turns, "mean")
    with torch.no_grad():
        low, high = exists & (ratio < 1 - clip_low), exists & (ratio > 1 + clip_high)
        token_gap = zero_masked((new - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), mask)
        metrics = {
            "units": exists.sum(),
            "clip_low": low.sum(),
            "clip_high": high.sum(),
            "ratio_sum": zero_masked(ratio, exists).sum(),
            "ratio_max": zero_masked(ratio, exists).max() if exists.any() else torch.zeros(()),
            "approx_kl": (
                token_gap.exp() - 1 - token_gap
            ).sum(),  # k3 of old against new, over sampled tokens
            "tokens": mask.sum(),
        }
    return Terms((zero_masked(loss, exists) * weights).sum(), metrics)


def kl_loss(new: Tensor, reference: Tensor, mask: Tensor, clamp: float | None, weights: Tensor) -> Terms:
    """Sum of k3(new against reference) over tokens, times `weights` [B, N].

    Tokens where the policy sits below the reference with k3 above `clamp` add neither loss nor gradient.
    """
    gap = zero_masked(reference - new, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3 = gap.exp() - gap - 1
    past = mask & (k3 > clamp) & (gap > 0) if clamp is not None else torch.zeros_like(mask)
    metrics = {"ref_kl": k3.detach().sum(), "kl_clamped": past.sum()}
    return Terms((zero_masked(k3, ~past) * weights).sum(), metrics)


def reward_kl(old: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
    """[B, N] k1 = log pi_old - log pi_ref of the sampled tokens, for a penalty in the reward."""
    return zero_masked(old - reference, mask)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    level: Level,
    num_turns: int,
    reduction: Literal["initial_value", "mean", "final_value"],
    clip: float | None,
    weights: Tensor,
) -> Terms:
    """Sum of 0.5 * max((G-V)^2, (G-clip(V))^2) over units, times `weights` [B, U].

    On the turn axis values are reduced to turns first; `returns` are constant over a turn.
    """
    how: Pooling = {"initial_value": "first", "mean": "mean", "final_value": "last"}[reduction]  # type: ignore[assignment]
    exists = unit_mask(mask, turns, level, num_turns)
    value = pool(values, mask, turns, level, num_turns, how)
    target = pool(returns, mask, turns, level, num_turns, "mean")
    loss = (target - value).square()
    clipped_units = torch.zeros_like(exists)
    if clip is not None:
        old = pool(old_values, mask, turns, level, num_turns, how)
        moved = old + (value - old).clamp(-clip, clip)
        limited = (target - moved).square()
        clipped_units = exists & (limited > loss)
        loss = torch.maximum(loss, limited)
    metrics = {"units": exists.sum(), "clipped": clipped_units.sum()}
    return Terms((zero_masked(0.5 * loss, exists) * weights).sum(), metrics)


def entropy_sum(entropy: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Sum of token entropies times `weights` [B, N]."""
    return (zero_masked(entropy, mask) * weights).sum()


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """1 - Var(G - V) / Var(G) over units, in fp64; None where the returns don't vary."""
    target, value = returns[mask].double(), values[mask].double()
    if target.numel() < 2:
        return None
    spread_of_returns = target.var(correction=0)
    if spread_of_returns < 1e-12:
        return None
    return float(1 - (target - value).var(correction=0) / spread_of_returns)


def correlation(values: Tensor, returns: Tensor, mask: Tensor) -> float | None:
    """Pearson correlation of values and returns over units; None where either doesn't vary."""
    target, value = returns[mask].double(), values[mask].double()
    if target.numel() < 2 or target.std(correction=0) < 1e-9 or value.std(correction=0) < 1e-9:
        return None
    return float(torch.corrcoef(torch.stack([target, value]))[0, 1])


__all__ = [
    "Terms",
    "correlation",
    "engine_weights",
    "entropy_sum",
    "explained_variance",
    "kl_loss",
    "log_ratio",
    "policy_loss",
    "reward_kl",
    "spread",
    "unit_weights",
    "value_loss",
]
