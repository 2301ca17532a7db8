"""How glibc's malloc, which serves torch on a CPU, treats the memory of freed tensors. Other systems are left alone."""

import ctypes
import os
from collections.abc import Mapping

# malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
# Freed memory stays: left alone, malloc returns that of each micro-batch to the kernel and pays for every page again.
KEEP = {M_MMAP_THRESHOLD: 32 << 20, M_TRIM_THRESHOLD: 256 << 20, M_TOP_PAD: 64 << 20}
# Each tensor that isn't small lies in pages of its own, which go back with it: no holes between those that stay.
RETURN = {M_MMAP_THRESHOLD: 4 << 20, M_TRIM_THRESHOLD: 4 << 20, M_TOP_PAD: 0}


def keep_freed_memory(keep: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Keep freed memory for the next micro-batch, or return it at once; whether anything was set.

    A user's own `MALLOC_...` or `GLIBC_TUNABLES` in the environment stand.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(option, value) for option, value in (KEEP if keep else RETURN).items())
