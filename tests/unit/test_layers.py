"""`torch_compiler`: equal numbers, compiled only in the update, and clear errors where it can't be."""

import shutil

import pytest
import torch

from llmppo.errors import ConfigError
from llmppo.testing.batches import StepRecorder, made_up_batch, tiny_agent

MODE = "default"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True, "update_epochs": 2}], ids=str)
def test_compiled_layers_give_equal_gradients(settings) -> None:
    found = []
    for compiler in (None, MODE):
        agent = tiny_agent(
            layers=1, beta=0.1, micro_batch_size_per_gpu=4, torch_compiler=compiler, **settings
        )
        recorder = StepRecorder(agent)
        metrics = agent.learn(made_up_batch())
        assert metrics["actor/ratio_max"] == pytest.approx(1, abs=0.2 if settings else 1e-5)
        found.append(recorder.actor + recorder.critic)
    for expected, got in zip(*found, strict=True):
        assert expected.norm() > 1e-3
        assert (got - expected).norm() <= 1e-4 * expected.norm()
    assert set(agent.model.layers._compiled) == {0}
    agent.recompile()
    assert not agent.model.layers._compiled


@needs_compiler
def test_sampling_runs_layers_as_they_are() -> None:
    agent = tiny_agent(torch_compiler=MODE, max_output_tokens=4, max_model_len=32)
    agent.get_action([{"input_ids": torch.tensor([[1, 2, 3]])}])
    assert not agent.model.layers._compiled


def test_what_cannot_compile_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no mode 'fast'; torch knows .*max-autotune"):
        tiny_agent(torch_compiler="fast")
    from torch._inductor import config

    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"),
    ):
        tiny_agent(torch_compiler=MODE)
