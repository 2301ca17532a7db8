"""Random numbers that depend on names, never on process state.

Every draw comes from a key such as (seed, "train", iteration, episode, turn), hashed to 63 bits, so
results are the same whatever process, shard or order computes them.
"""

import hashlib


def derive_seed(*key: int | str) -> int:
    """Hash a key of integers and strings to a seed in [0, 2**63)."""
    text = "/".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
