"""Running mean and deviation of returns, for `normalize_returns`.

With it the critic's outputs live in normalised units: values are restored before GAE, targets are
normalised before the value loss. When the statistics move, the value head is rescaled so that restored
values stay what they were (Pop-Art, van Hasselt et al. 2016). Off, every method is the identity.
"""

from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn


@dataclass
class RunningReturns:
    """Welford's mean and variance over all returns seen; part of the trainer's state."""

    enabled: bool = False
    count: float = 0.0
    mean: float = 0.0
    variance: float = 1.0

    @property
    def deviation(self) -> float:
        return max(self.variance, 1e-8) ** 0.5

    def update(self, returns: Tensor, value_head: nn.Linear) -> None:
        """Add returns [n] (Chan et al. 1979, parallel variance) and rescale the head in place."""
        added = float(returns.numel())
        if not self.enabled or not added:
            return
        old_mean, old_deviation = self.mean, self.deviation
        mean, variance = float(returns.double().mean()), float(returns.double().var(correction=0))
        total = self.count + added
        shift = mean - self.mean
        squares = self.variance * self.count + variance * added + shift**2 * self.count * added / total
        self.mean, self.variance, self.count = self.mean + shift * added / total, squares / total, total
        with torch.no_grad():
            value_head.weight.mul_(old_deviation / self.deviation)
            value_head.bias.mul_(old_deviation).add_(old_mean - self.mean).div_(self.deviation)

    @overload
    def restore(self, values: Tensor) -> Tensor: ...
    @overload
    def restore(self, values: None) -> None: ...
    def restore(self, values: Tensor | None) -> Tensor | None:
        """Critic outputs to reward units."""
        if values is None or not self.enabled or not self.count:
            return values
        return values * self.deviation + self.mean

    def normalise(self, returns: Tensor) -> Tensor:
        """Reward units to the critic's units."""
        if not self.enabled or not self.count:
            return returns
        return (returns - self.mean) / self.deviation
