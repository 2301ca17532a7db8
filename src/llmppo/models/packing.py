"""Several rows packed into one, without padding.

Positions that start again at 0 tell transformers where a row begins, and its masks then keep rows apart (sdpa, eager,
flex_attention); flash_attention_2 reads the row ends from them. `attend_by_row` is sdpa that computes only the blocks of
that mask which rows need, so that the cost of attention doesn't grow with the number of packed rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

BY_ROW = "sdpa_by_row"


def row_positions(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Position of each token in its row [1, T]."""
    return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def attend_by_row(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    row_lengths: Sequence[int] | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention ([1, heads, T, d] to [1, T, heads, d]), row by row where `row_lengths` says so."""
    if row_lengths is None or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    pieces, start = [], 0
    for length in row_lengths:
        row = slice(start, start + length)
        piece, _ = sdpa_attention_forward(
            module, query[:, :, row], key[:, :, row], value[:, :, row],
            attention_mask[..., row, row], **options,
        )  # fmt: skip
        pieces.append(piece)
        start += length
    return torch.cat(pieces, dim=1), None


AttentionInterface.register(BY_ROW, attend_by_row)
AttentionMaskInterface.register(BY_ROW, sdpa_mask)
