"""Log-probs by liger-kernel's chunked losses: pure torch, tiled over positions and over the vocabulary.

What its policy losses compute for each token, without their loss on top, so that every ratio level, clip and
normalisation of ours applies. There is no entropy, and no restriction to a sampling support.
"""

from collections.abc import Mapping
from importlib.util import find_spec

import torch
from torch import Tensor

from llmppo.errors import ConfigError
from llmppo.models.head import OutputHead, bias_row


class LigerScorer:
    """A `TokenScorer` whose log-probs, and their gradient, are Liger's; entropies are None."""

    def __init__(
        self,
        head: OutputHead,
        *,
        temperature: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        tile_rows: int | None = None,
    ) -> None:
        if find_spec("liger_kernel") is None:
            raise ConfigError(
                "use_liger_loss needs liger-kernel; `make memory` installs it, or pip install --no-deps -r requirements-memory.lock"
            )
        if head.soft_cap is not None or head.scale != 1.0:
            raise ConfigError(
                "use_liger_loss: this model caps or scales its logits, which Liger doesn't; set use_liger_loss: false"
            )
        from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

        self.score = LigerFusedLinearPPOBase.chunk_forward
        self.weight: Tensor = head.module.weight
        self.temperature = temperature
        self.tile_rows = tile_rows
        self.bias: Tensor | None = head.module.bias
        if logit_bias:  # Liger adds its bias before it divides by the temperature
            offsets = temperature * bias_row(logit_bias, head.vocabulary).to(self.weight.device)
            self.bias = offsets if self.bias is None else self.bias + offsets

    def __call__(
        self, hidden: Tensor, tokens: Tensor, supports: Tensor | None = None, *, entropy: bool = False
    ) -> tuple[Tensor, None]:
        """Log-probs, fp32 [n], of `tokens` [n] at hidden states [n, H]; `entropy` changes nothing.

        Raises ConfigError for `supports`.
        """
        if supports is not None and bool((supports >= 0).any()):
            raise ConfigError(
                "use_liger_loss scores over the whole vocabulary, these episodes were sampled from part of it; "
                "set top_k: 0 or use_liger_loss: false"
            )
        states = hidden.to(self.weight.dtype)
        size = self.tile_rows or max(len(states), 1)
        logps = [
            self.score(rows[None], self.weight, chosen[None], self.bias, self.temperature)[0]
            for rows, chosen in zip(states.split(size), tokens.split(size), strict=True)
        ]
        return torch.cat(logps), None
