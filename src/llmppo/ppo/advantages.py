"""Generalised advantage estimation over turns or over action tokens.

GAE: Schulman et al. 2016 (arXiv:1506.02438), equations 11 and 16; decoupled lambda: VC-PPO
(arXiv:2503.01491); length-adaptive lambda: VAPO (arXiv:2504.05118). `V` is the value of the state
before the action. Observations are not units, so they can neither cut nor discount the recursion.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmppo.ppo.units import edge_tokens, pool, spread, tokens_per_turn, zero_masked

MIN_WHITENING_DEVIATION = 1e-6


@dataclass(frozen=True)
class Advantages:
    """Unwhitened advantages and critic targets; `unit_*` on the GAE axis [B, U], the rest per token [B, N]."""

    advantages: Tensor  # [B, N]
    returns: Tensor  # [B, N]
    unit_advantages: Tensor  # [B, U]
    unit_returns: Tensor  # [B, U]
    unit_values: Tensor  # [B, U]
    unit_mask: Tensor  # [B, U]


def gae(
    rewards: Tensor, values: Tensor, discounts: Tensor, lam: Tensor | float, mask: Tensor, bootstrap: Tensor
) -> Tensor:
    """Advantages [B, U] by a reversed scan over units.

    delta_u = r_u + d_u * V_{u+1} - V_u and A_u = delta_u + d_u * lam * A_{u+1}, where d_u [B, U] is the
    discount from unit u to the next. After the last true entry of `mask` (a prefix of each row) the value
    is `bootstrap` [B]. `lam` is a number or [B].
    """
    rewards, values, discounts = (zero_masked(x, mask) for x in (rewards, values, discounts))
    advantages = torch.zeros_like(values)
    next_value = bootstrap.to(values.dtype)
    running = torch.zeros_like(next_value)
    for unit in range(values.shape[1] - 1, -1, -1):
        exists = mask[:, unit]
        delta = rewards[:, unit] + discounts[:, unit] * next_value - values[:, unit]
        running = torch.where(exists, delta + discounts[:, unit] * lam * running, running)
        next_value = torch.where(exists, values[:, unit], next_value)
        advantages[:, unit] = zero_masked(running, exists)
    return advantages


def turn_advantages(
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    rewards: Tensor,
    *,
    gamma: float,
    lam: float,
    critic_lam: float,
    reduction: Literal["initial_value", "mean", "final_value"],
    bootstrap: Tensor,
) -> Advantages:
    """GAE over turns. `values`, `mask`, `turns` [B, N]; `rewards` [B, K]; `bootstrap` [B].

    A turn without tokens took no action: it has no advantage, and its value is what follows it
    (r + gamma * V of the next turn), so its reward still reaches earlier turns.
    """
    num_turns = rewards.shape[1]
    how: Literal["first", "mean", "last"] = {"initial_value": "first", "mean": "mean", "final_value": "last"}[
        reduction
    ]  # type: ignore[assignment]
    acted = tokens_per_turn(mask, turns, num_turns) > 0
    counts = acted | (rewards != 0)  # a reward after the last token still belongs to what was done before
    last_turn = torch.where(counts, torch.arange(num_turns, device=mask.device), -1).amax(dim=1)  # [B]
    exists = torch.arange(num_turns, device=mask.device)[None, :] <= last_turn[:, None]
    turn_values = pool(values, mask, turns, "turn", num_turns, how)
    following = bootstrap.to(turn_values.dtype)
    for turn in range(num_turns - 1, -1, -1):  # fill in turns without tokens
        passed = rewards[:, turn] + gamma * following
        skipped = exists[:, turn] & ~acted[:, turn]
        turn_values[:, turn] = torch.where(skipped, passed, turn_values[:, turn])
        following = torch.where(exists[:, turn], turn_values[:, turn], following)
    discounts = torch.full_like(turn_values, gamma)
    advantages = gae(rewards, turn_values, discounts, lam, exists, bootstrap)
    critic_advantages = (
        advantages
        if critic_lam == lam
        else gae(rewards, turn_values, discounts, critic_lam, exists, bootstrap)
    )
    returns = zero_masked(critic_advantages + turn_values, acted)
    advantages = zero_masked(advantages, acted)
    return Advantages(
        spread(advantages, mask, turns),
        spread(returns, mask, turns),
        advantages,
        returns,
        zero_masked(turn_values, acted),
        acted,
    )


def token_advantages(
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    rewards: Tensor,
    *,
    gamma: float,
    token_gamma: float,
    lam: float,
    critic_lam: float,
    length_adaptive_alpha: float | None,
    bootstrap: Tensor,
) -> Advantages:
    """GAE over action tokens; `rewards` [B, N] per token (see `token_rewards`).

    The discount after a token is `gamma` where it is the last of its turn, else `token_gamma`.
    """
    ends = edge_tokens(mask, turns, "last")
    discounts = torch.where(ends, gamma, token_gamma).to(values.dtype)
    policy_lam: Tensor | float = lam
    if length_adaptive_alpha is not None:
        policy_lam = (
            (1 - 1 / (length_adaptive_alpha * mask.sum(dim=1).clamp(min=1))).clamp(min=0.0).to(values.dtype)
        )
    advantages = gae(rewards, values, discounts, policy_lam, mask, bootstrap)
    same = critic_lam == lam and length_adaptive_alpha is None
    critic_advantages = advantages if same else gae(rewards, values, discounts, critic_lam, mask, bootstrap)
    kept = zero_masked(values, mask)
    returns = zero_masked(critic_advantages + kept, mask)
    return Advantages(advantages, returns, advantages, returns, kept, mask)


def token_rewards(rewards: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
    """[B, K] turn rewards to [B, N]: each on the last action token of its turn, so that sums agree.

    The reward of a turn without tokens goes to the last token before it (or the first one at all).
    """
    num_turns = rewards.shape[1]
    acted = tokens_per_turn(mask, turns, num_turns) > 0
    numbers = torch.arange(num_turns, device=mask.device)
    holder = torch.where(acted, numbers, -1).cummax(dim=1).values
    first = torch.where(acted, numbers, num_turns).amin(dim=1, keepdim=True)
    holder = torch.where(holder < 0, first, holder)
    owned = acted.any(dim=1, keepdim=True)
    collected = torch.zeros_like(rewards).scatter_add(
        1, holder.clamp(max=num_turns - 1), zero_masked(rewards, owned)
    )
    return zero_masked(spread(collected, mask, turns), edge_tokens(mask, turns, "last"))


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(x - mean) / deviation over true entries, in fp32; unchanged below 2 entries or a deviation under 1e-6.

    The deviation is the unbiased one; 1e-8 is added to the variance.
    """
    chosen = values[mask].float()
    if chosen.numel() < 2:
        return values
    variance, mean = torch.var_mean(chosen, correction=1)
    if variance.sqrt() < MIN_WHITENING_DEVIATION:
        return values
    return zero_masked((values - mean) * torch.rsqrt(variance + 1e-8), mask)
