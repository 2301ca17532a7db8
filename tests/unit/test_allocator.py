"""What glibc does with freed memory: chosen by whether layers are recomputed, unless the user has chosen."""

import os
import subprocess
import sys

import pytest

from llmppo.trainer.allocator import keep_freed_memory

# A learn step whose activations are tensors of 8 MiB; prints its peak of resident memory over the loaded model, in MiB.
STEP = """
import pathlib, sys, torch
from llmppo import LLMPPO
from llmppo.testing.models import tiny_model
from llmppo.trainer.batch import build_batch

torch.set_num_threads(1)
model = tiny_model(layers=6, hidden=512, heads=8, kv_heads=8, intermediate=1024, vocab_size=300, family="llama")
agent = LLMPPO(actor_network=model, beta=0.0, gradient_checkpointing=True)
turns = torch.tensor([-1] * 128 + [0] * 128)
ids = torch.randint(0, 300, (8, 256), generator=torch.Generator().manual_seed(0))
batch = build_batch(list("abcdefgh"), list(ids), [turns] * 8, [[0.0], [1.0]] * 4, [False] * 8)

def resident(field):
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith(field))

pathlib.Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
agent.learn(batch)
print(resident("VmHWM") - before)
"""


def test_what_the_user_has_set_stands() -> None:
    assert keep_freed_memory(True, {"PATH": "/bin"})
    assert not keep_freed_memory(True, {"MALLOC_MMAP_THRESHOLD_": "1048576"})
    assert not keep_freed_memory(False, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux' /proc")
def test_recomputation_leaves_no_holes() -> None:
    """Against malloc left alone, whose thresholds grow with what is freed: `MALLOC_ARENA_MAX` says that the user chooses."""
    ours, alone = (
        float(subprocess.check_output([sys.executable, "-c", STEP], env={**os.environ, **more}))
        for more in ({}, {"MALLOC_ARENA_MAX": "8"})
    )
    assert ours < 0.7 * alone
