"""What a chain had spent by each of its iterations: episodes, sampled tokens, time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from llmppo.reporting.results import Chain, Record
from llmppo.reporting.timing import chain_seconds, iteration_seconds

Key = tuple[str, int]


@dataclass(frozen=True)
class Axis:
    """Amounts to draw success over: chain key to iteration to what was spent so far."""

    name: str
    label: str
    spent: Mapping[Key, Mapping[int, float]]

    def at(self, keys: Sequence[Key], iteration: int) -> float:
        """Mean over chains; one that stopped earlier has what it had then."""
        found = [self.spent[key] for key in keys if key in self.spent]
        amounts = [row.get(iteration, max(row.values())) for row in found]
        return sum(amounts) / len(amounts) if amounts else 0.0


def _spent(chain: Chain, start: float, of: Callable[[Record], float | None]) -> dict[int, float]:
    totals = accumulate((of(record) or 0.0 for record in chain.updates), initial=start)
    return dict(zip([0, *(record.iteration for record in chain.updates)], totals, strict=True))


def _tokens(record: Record) -> float | None:
    names = ("rollout/episodes", "rollout/turns_mean", "rollout/response_tokens_mean")
    if not all(name in record.metrics for name in names):
        return None
    episodes, turns, tokens = (record.metrics[name] for name in names)
    return episodes * turns * tokens


def _minutes(chain: Chain) -> dict[int, float] | None:
    seconds = iteration_seconds(chain)
    if any(record.iteration not in seconds for record in chain.updates):
        return None
    warmup = sum(chain_seconds(chain).get("critic_warmup", []))
    return {i: total / 60 for i, total in _spent(chain, warmup, lambda r: seconds[r.iteration]).items()}


def cost_axes(chains: Sequence[Chain], batch_size: int) -> list[Axis]:
    """Episodes, tokens and minutes, without those that some update didn't record.

    Minutes are those of the jobs of critic warm-up, rollouts and updates.
    """
    begun = [chain for chain in chains if chain.updates]
    if not begun:
        return []
    axes = [Axis("episodes", "training episodes", {c.key: c.episodes(batch_size) for c in begun})]
    if all(_tokens(record) is not None for chain in begun for record in chain.updates):
        axes.append(Axis("tokens", "sampled tokens", {c.key: _spent(c, 0.0, _tokens) for c in begun}))
    minutes = {chain.key: _minutes(chain) for chain in begun}
    known = {key: spent for key, spent in minutes.items() if spent is not None}
    return axes + [Axis("time", "minutes", known)] * (len(known) == len(minutes))


def shared_episodes(axes: Sequence[Axis]) -> dict[int, int] | None:
    """Iteration to training episodes where all chains agree on them."""
    shared: dict[int, int] = {}
    for spent in next((axis.spent for axis in axes if axis.name == "episodes"), {}).values():
        for iteration, count in spent.items():
            if shared.setdefault(iteration, int(count)) != count:
                return None
    return shared or None
