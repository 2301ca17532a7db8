"""Log-probs and entropies of chosen tokens, computed tile by tile from final hidden states.

Only the positions given are multiplied with the output head. A tile's logits are recomputed in the
backward pass and never kept; the frozen head gets no gradient. The same function serves the policy,
the old policy, the reference and the rollout engine's last position.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from llmppo.errors import ConfigError

TILE_BYTES = 256 * 2**20


def default_tile_rows(vocabulary: int) -> int:
    """Positions whose fp32 logits take 256 MiB, between 128 and 4096."""
    return max(128, min(4096, TILE_BYTES // (4 * vocabulary)))


class OutputHead:
    """A causal LM's output head with what its family does to logits (soft-cap, scale)."""

    def __init__(self, model: Any) -> None:
        self.module: nn.Linear = model.get_output_embeddings()
        config = model.config.get_text_config()
        self.soft_cap: float | None = getattr(config, "final_logit_softcapping", None)
        scale = getattr(config, "logit_scale", None)
        divisor = getattr(config, "logits_scaling", None)
        self.scale = (1.0 if scale is None else float(scale)) / (1.0 if divisor is None else float(divisor))

    @property
    def vocabulary(self) -> int:
        return int(self.module.weight.shape[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of the model for final hidden states [..., H], in fp32."""
        logits = self.module(hidden.to(self.module.weight.dtype)).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def bias_row(logit_bias: Mapping[int, float], vocabulary: int) -> Tensor:
    """Offsets [V] to add to the logits. Raises ConfigError for an id outside the vocabulary."""
    row = torch.zeros(vocabulary)
    for token, offset in logit_bias.items():
        if not 0 <= token < vocabulary:
            raise ConfigError(f"logit_bias: no token {token}; the model's ids are 0 to {vocabulary - 1}")
        row[token] = offset
    return row


class TokenScorer:
    """log pi(token | prefix) at a temperature, with a logit bias, over the vocabulary or a support."""

    def __init__(
        self,
        head: OutputHead,
        *,
        temperature: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        tile_rows: int | None = None,
        reduce_in_fp32: bool = True,
    ) -> None:
        self.head = head
        self.temperature = temperature
        self.tile_rows = tile_rows or default_tile_rows(head.vocabulary)
        self.reduce_in_fp32 = reduce_in_fp32
        self.bias: Tensor | None = None
        if logit_bias:
            self.bias = bias_row(logit_bias, head.vocabulary)

    def _tile(self, hidden: Tensor, tokens: Tensor, support: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = self.head.logits(hidden)
        if not self.reduce_in_fp32:
            logits = logits.to(hidden.dtype)
        if self.temperature != 1.0:
            logits = logits / self.temperature
        if self.bias is not None:
            logits = logits + self.bias.to(logits.device, logits.dtype)
        if support is not None:
            # Padding goes to a column of its own, which is cut off: at index 0 it would hide token 0.
            wide = logits.new_zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool)
            allowed = wide.scatter_(1, torch.where(support < 0, logits.shape[1], support), True)[:, :-1]
            restricted = (support >= 0).any(dim=1, keepdim=True)
            logits = torch.where(allowed | ~restricted, logits, torch.full_like(logits, -torch.inf))
        logs = torch.log_softmax(logits, dim=-1)
        finite = torch.where(torch.isfinite(logs), logs, torch.zeros_like(logs))
        entropy = -(logs.exp() * finite).sum(dim=-1)
        return logs.gather(1, tokens[:, None]).squeeze(1).float(), entropy.float()

    def __call__(
        self, hidden: Tensor, tokens: Tensor, supports: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and true entropies, fp32 [n], of `tokens` [n] at hidden states [n, H].

        `supports` [n, S] lists the token ids that could be sampled, padded with -1; a row without any is
        unrestricted. A token outside its support has log-prob -inf.
        """
        logps, entropies = [], []
        for start in range(0, hidden.shape[0], self.tile_rows):
            rows = slice(start, start + self.tile_rows)
            support = None if supports is None else supports[rows]
            if torch.is_grad_enabled() and hidden.requires_grad:
                logp, entropy = checkpoint(
                    self._tile, hidden[rows], tokens[rows], support, use_reentrant=False
                )
            else:
                logp, entropy = self._tile(hidden[rows], tokens[rows], support)
            logps.append(logp)
            entropies.append(entropy)
        if not logps:
            empty = hidden.new_zeros(0, dtype=torch.float32)
            return empty, empty
        return torch.cat(logps), torch.cat(entropies)
