"""Pooling of action tokens to the unit that advantages, ratios and values live on.

A unit is a token, a turn or the whole episode (trajectory). `turns` [B, N] holds the turn of each
action token; `mask` [B, N] is true where a token exists. Masked entries may hold anything, NaN
included: they are replaced before any arithmetic.
"""

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "turn", "trajectory"]
Pooling = Literal["sum", "mean", "first", "last"]


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with masked entries set to 0 (not multiplied: NaN * 0 is NaN)."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over true entries of `mask`; 0 where there are none."""
    return zero_masked(values, mask).sum() / mask.sum().clamp(min=1)


def unit_mask(mask: Tensor, turns: Tensor, level: Level, num_turns: int) -> Tensor:
    """[B, U] true where the unit has at least one token; U is N, K or 1."""
    if level == "token":
        return mask
    if level == "trajectory":
        return mask.any(dim=1, keepdim=True)
    return tokens_per_turn(mask, turns, num_turns) > 0


def tokens_per_turn(mask: Tensor, turns: Tensor, num_turns: int) -> Tensor:
    """[B, K] number of action tokens of each turn."""
    counts = torch.zeros(mask.shape[0], num_turns, device=mask.device)
    return counts.scatter_add(1, zero_masked(turns, mask), mask.to(counts.dtype))


def pool(values: Tensor, mask: Tensor, turns: Tensor, level: Level, num_turns: int, how: Pooling) -> Tensor:
    """[B, N] token values to [B, U] unit values; units without tokens are 0.

    `first` and `last` take the unit's first or last token (turn level only).
    """
    if level == "token":
        return zero_masked(values, mask)
    kept = zero_masked(values, mask)
    if level == "trajectory":
        total = kept.sum(dim=1, keepdim=True)
        return total if how == "sum" else total / mask.sum(dim=1, keepdim=True).clamp(min=1)
    index = zero_masked(turns, mask)
    if how in ("first", "last"):
        kept = zero_masked(values, mask & edge_tokens(mask, turns, how))
    total = torch.zeros(mask.shape[0], num_turns, dtype=values.dtype, device=values.device).scatter_add(
        1, index, kept
    )
    if how == "mean":
        return total / tokens_per_turn(mask, turns, num_turns).clamp(min=1).to(total.dtype)
    return total


def edge_tokens(mask: Tensor, turns: Tensor, which: Literal["first", "last"] | str) -> Tensor:
    """[B, N] true at the first or last action token of each turn."""
    shown = torch.where(mask, turns, torch.full_like(turns, -1))
    border = torch.full_like(shown[:, :1], -2)
    neighbour = (
        torch.cat([border, shown[:, :-1]], 1) if which == "first" else torch.cat([shown[:, 1:], border], 1)
    )
    return mask & (neighbour != shown)


def spread(unit_values: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
    """[B, K] turn values to [B, N]: each action token gets its turn's value, other slots 0."""
    return zero_masked(unit_values.gather(1, zero_masked(turns, mask)), mask)
