"""Learning-rate schedule: linear warm-up, then half a cosine, one step per learn call."""

import math

from llmppo.config import CosineLRScheduleConfig


def lr_scale(step: int, schedule: CosineLRScheduleConfig | None, start: int = 0) -> float:
    """Factor on the peak learning rate for learn call `step` (0-based).

    Before `start` it is 0. The k-th call after `start` is scaled by (k+1)/warmup while warming up
    (`warmup = int(n * proportion)`, n the calls between `start` and `num_steps`), then by half a cosine
    that reaches `min_lr_ratio` at `num_steps` and stays there. Without a schedule the factor is 1.
    """
    if step < start:
        return 0.0
    if schedule is None:
        return 1.0
    length = schedule.num_steps - start
    call = step - start
    warmup = int(length * schedule.warmup_proportion)
    if call < warmup:
        return (call + 1) / warmup
    progress = min((call - warmup) / max(length - warmup, 1), 1.0)
    return schedule.min_lr_ratio + (1 - schedule.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
