"""Small models, and decoding steps of a few rows, run on one thread of a CPU: they have no use for more.

A thread that waits without spinning, as those of stages do, takes a twentieth of a millisecond to wake.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Weights of an MLP's projection from which a second thread saves a fifth of an update's time or more (docs/performance.md).
WORTH_A_THREAD = 2**16
# Multiplications of such a projection with all tokens of a pass, from which it isn't faster alone.
WORTH_WAKING = 2**26


def mlp_width(config: Any) -> int:
    """The widest MLP of a text config; a few families have one for each layer."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return int(max(width)) if isinstance(width, (list, tuple)) else int(width)


@contextmanager
def helpful_threads(model: Any, tokens: int | None = None) -> Iterator[None]:
    """Run what follows on one thread if the layers of `model`, a transformers model on a CPU, are small.

    Or small for the few `tokens` of a single pass.
    """
    config, before = model.config.get_text_config(), torch.get_num_threads()
    weights = config.hidden_size * mlp_width(config)
    small = weights < WORTH_A_THREAD or (tokens is not None and tokens * weights < WORTH_WAKING)
    if before == 1 or not small or model.device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
