"""Rewards of evaluation episodes, turn by turn."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from llmppo.reporting.results import Chain
from llmppo.reporting.summary import VariantSummary
from llmppo.reporting.transcripts import read_episodes


def rewards_by_turn(
    variants: Sequence[VariantSummary], decoding: str
) -> dict[str, tuple[int, Mapping[int, float], Mapping[int, float]]]:
    """Variant to (place, turn to mean reward before training, the same after it), means over seeds of turns from 1 on.

    Empty where no episode has a second turn.
    """
    found: dict[str, tuple[int, Mapping[int, float], Mapping[int, float]]] = {}
    for variant in variants:
        before, after = (_means(variant.chains, place, decoding) for place in (0, -1))
        if before and after:
            found[variant.name] = (variant.place, before, after)
    longest = max((max(after) for _, _, after in found.values()), default=0)
    return found if longest > 1 else {}


def _means(chains: Sequence[Chain], place: int, decoding: str) -> dict[int, float]:
    seeds: dict[int, list[float]] = defaultdict(list)
    for chain in chains:
        if not chain.scored:
            continue
        path = chain.evaluation_file(chain.scored[place].iteration, decoding)
        rewards: dict[int, list[float]] = defaultdict(list)
        for row in read_episodes(path, ["turn_rewards"]) if path.is_file() else []:
            for turn, reward in enumerate(row["turn_rewards"], 1):
                rewards[turn].append(reward)
        for turn, values in rewards.items():
            seeds[turn].append(fmean(values))
    return {turn: fmean(seeds[turn]) for turn in sorted(seeds)}
