"""How far the policy that learns is from the one that sampled: what stored episodes are still worth to it.

With rho = pi(token) / mu(token), where mu sampled, the KL divergence of mu to pi is estimated by k3,
rho - 1 - log rho (Schulman, "Approximating KL Divergence", 2020), and the effective sample size by Kish's
(sum w)^2 / (n sum w^2), with w the ratio of a token, or of a whole episode (the product over its tokens).
"""

import torch
from torch import Tensor

from llmppo.ppo.units import zero_masked


def off_policy(new: Tensor, sampling: Tensor, mask: Tensor) -> dict[str, float]:
    """Measures of log-probs `new` [B, N] against those sampled with; tokens without a finite one are left out.

    `kl` in nats a token, `ratio_max` of a token, `ess_tokens` and `ess_episodes` as shares of 0 to 1. Empty
    where no token has a log-prob.
    """
    known = mask & torch.isfinite(sampling)
    if not known.any():
        return {}
    gap = zero_masked(new.double() - sampling.double(), known)
    tokens = gap[known]
    return {
        "kl": float((tokens.exp() - 1 - tokens).mean()),
        "ratio_max": float(tokens.max().exp()),
        "ess_tokens": effective_share(tokens),
        "ess_episodes": effective_share(gap.sum(dim=1)[known.any(dim=1)]),
    }


def effective_share(log_weights: Tensor) -> float:
    """Kish's effective sample size of `exp(log_weights)` [n] as a share of n."""
    twice = 2 * torch.logsumexp(log_weights, 0) - torch.logsumexp(2 * log_weights, 0)
    return float(twice.exp()) / len(log_weights)
