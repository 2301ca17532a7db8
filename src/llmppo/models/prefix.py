"""Keys and values of tokens with which all rows of a pass begin, so that those run once and not in every row."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llmppo.engines.kept import keeps_everything


class _Prefix(DynamicLayer):
    """One layer's keys and values, set before the keys and values of whatever runs; it keeps nothing of that."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)


def can_share(config: Any) -> bool:
    """Whether the model's layers see all positions through keys and values, without a window or a recurrent state.

    And whether keys don't depend on what follows them, as they do where the length of a pass changes the rotation.
    """
    return rotation_changes_at(config) is None and keeps_everything(DynamicCache(config=config))


def rotation_changes_at(config: Any) -> int | None:
    """Tokens of a pass beyond which the model rotates all of its positions otherwise (`dynamic` and `longrope`)."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return None
    original = rope.get("original_max_position_embeddings") or getattr(
        text, "original_max_position_embeddings", None
    )
    return int(original or text.max_position_embeddings)


def for_rows(cache: DynamicCache, rows: int) -> DynamicCache:
    """What `cache` holds of each group's prefix, [G, H, P, D] a layer, for `rows` rows of every group.

    Layers that haven't run stand for the first that has: transformers asks any of them for the number of tokens.
    """
    ran = [layer for layer in cache.layers if layer.is_initialized]
    layers = {id(layer): _Prefix(_repeated(layer.keys, rows), _repeated(layer.values, rows)) for layer in ran}
    cache.layers = [layers.get(id(layer), layers[id(ran[0])]) for layer in cache.layers]
    return cache


def _repeated(states: Tensor, rows: int) -> Tensor:
    return states[:, None].expand(-1, rows, -1, -1, -1).flatten(0, 1)


def common_prefix(rows: Tensor, most: int) -> int:
    """Number of tokens, at most `most`, that all `rows` [B, T] begin with."""
    same = (rows[:, :most] == rows[:1, :most]).all(dim=0)
    return int(same.long().cumprod(dim=0).sum())
