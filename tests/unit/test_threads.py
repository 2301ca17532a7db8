"""How many threads a model's passes run on."""

import pytest
import torch

from llmppo.engines.base import GenerationRequest
from llmppo.testing.batches import made_up_batch, tiny_agent


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("hidden", "threads"), [(16, {1}), (256, {2})])
def test_a_small_model_learns_on_one_thread_and_few_rows_decode_on_one(two_threads, hidden, threads):
    agent = tiny_agent(hidden=hidden)
    seen = []
    agent.model.layers.layers[0].mlp.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    agent.learn(made_up_batch())
    learning = len(seen)
    agent.critic_explained_variance(made_up_batch())
    looking = len(seen)
    assert 0 < learning < looking
    assert set(seen) == threads
    prompt = tuple(range(5, 45)) * 24
    agent.engine.generate([GenerationRequest(token_ids=prompt, seed=0, max_new_tokens=2, min_new_tokens=2)])
    assert seen[looking:] == [*threads, 1]  # the prompt, then a token
    assert torch.get_num_threads() == 2
