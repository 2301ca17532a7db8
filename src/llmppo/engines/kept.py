"""Keys and values that the `hf` engine keeps of a transcript, so that the next turn runs its new tokens only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class KeptCache:
    """The first tokens of one episode's transcript and, by layer, their keys and values [H, T, D].

    It belongs to the episode: the engine fills it with each reply and reads it where the next request goes on
    from `token_ids`. Empty at first; `read_only` once no further turn can follow.
    """

    token_ids: list[int] = field(default_factory=list)
    layers: "list[tuple[Tensor, Tensor]]" = field(default_factory=list)
    read_only: bool = False

    def usable(self, token_ids: Sequence[int]) -> bool:
        """Whether a transcript starts with the kept tokens and has more, as a model needs a token to run."""
        count = len(self.token_ids)
        return 0 < count < len(token_ids) and self.token_ids == list(token_ids[:count])

    def keep(self, cache: Any, row: int, columns: "Tensor", token_ids: Sequence[int]) -> None:
        """Copy row `row` of a batch's cache; `columns` are the places of `token_ids` in it."""
        self.token_ids = list(token_ids)
        self.layers = [
            (layer.keys[row].index_select(1, columns), layer.values[row].index_select(1, columns))
            for layer in cache.layers
        ]

    def clear(self) -> None:
        """Let go of everything."""
        self.token_ids, self.layers = [], []


def keeps_everything(cache: Any) -> bool:
    """Whether a new cache will hold all positions of all layers, without a sliding window or a recurrent state."""
    from transformers.cache_utils import DynamicLayer

    layers: Any = getattr(cache, "layers", None)
    return bool(layers) and all(type(layer) is DynamicLayer for layer in layers)


def restore(cache: Any, kept: Sequence[KeptCache | None]) -> int:
    """Fill a new cache with a row for each of `kept`, left-padded (None: nothing but padding); returns the width."""
    import torch

    given = [entry for entry in kept if entry is not None]
    width = max((len(entry.token_ids) for entry in given), default=0)
    if width == 0:
        return 0
    for number, (keys, _) in enumerate(given[0].layers):
        heads, _, size = keys.shape
        both = torch.zeros(2, len(kept), heads, width, size, dtype=keys.dtype, device=keys.device)
        for row, entry in enumerate(kept):
            if entry is not None:
                start = width - len(entry.token_ids)
                both[0, row, :, start:], both[1, row, :, start:] = entry.layers[number]
        cache.update(both[0], both[1], number)
    return width
