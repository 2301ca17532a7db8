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

TILE_BYTES = 32 * 2**20


def default_tile_rows(vocabulary: int) -> int:
    """Positions whose fp32 logits take 32 MiB, between 128 and 4096: a tile's gradient holds several times as much."""
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
        entropy_gradient: bool = True,
    ) -> None:
        self.head = head
        self.temperature = temperature
        self.tile_rows = tile_rows or default_tile_rows(head.vocabulary)
        self.reduce_in_fp32 = reduce_in_fp32
        self.entropy_gradient = entropy_gradient
        self.bias: Tensor | None = None
        if logit_bias:
            self.bias = bias_row(logit_bias, head.vocabulary)

    def _tile(
        self, hidden: Tensor, tokens: Tensor, support: Tensor | None, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
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
        logp = logs.gather(1, tokens[:, None]).squeeze(1).float()
        if not entropy:
            return logp, None
        # Last, so that recomputation in the backward pass stops before it where it has no gradient.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.entropy_gradient):
            finite = logs
            if support is not None or self.bias is not None:
                finite = torch.where(torch.isfinite(logs), logs, torch.zeros_like(logs))
            return logp, -(logs.exp() * finite).sum(dim=-1).float()

    def __call__(
        self, hidden: Tensor, tokens: Tensor, supports: Tensor | None = None, *, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs and true entropies, fp32 [n], of `tokens` [n] at hidden states [n, H].

        Without `entropy` the second is None. It has a gradient only with `entropy_gradient`.
        `supports` [n, S] lists the token ids that could be sampled, padded with -1; a row without any is
        unrestricted. A token outside its support has log-prob -inf.
        """
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        for start in range(0, hidden.shape[0], self.tile_rows):
            rows = slice(start, start + self.tile_rows)
            tile = hidden[rows], tokens[rows], None if supports is None else supports[rows], entropy
            if torch.is_grad_enabled() and hidden.requires_grad:
                logp, spread = checkpoint(self._tile, *tile, use_reentrant=False)
            else:
                logp, spread = self._tile(*tile)
            logps.append(logp)
            if spread is not None:
                entropies.append(spread)
        empty = hidden.new_zeros(0, dtype=torch.float32)
        return torch.cat([empty, *logps]), torch.cat([empty, *entropies]) if entropy else None
