"""A small model runs on one thread of a CPU: it has no use for more."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Weights of an MLP's projection from which a second thread saves a fifth of an update's time or more (docs/performance.md).
WORTH_A_THREAD = 2**16


def mlp_width(config: Any) -> int:
    """The widest MLP of a text config; a few families have one for each layer."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(width)) if isinstance(width, (list, tuple)) else int(width)


@contextmanager
def helpful_threads(model: Any) -> Iterator[None]:
    """Run what follows on one thread if the layers of `model`, a transformers model on a CPU, are small."""
    config, before = model.config.get_text_config(), torch.get_num_threads()
    if before == 1 or config.hidden_size * mlp_width(config) >= WORTH_A_THREAD or model.device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
