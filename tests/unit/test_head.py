"""Log-probs and entropies from hidden states: equal to those of the model's own full logits."""

import math

import pytest
import torch
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from llmppo.errors import ConfigError
from llmppo.models.head import OutputHead, TokenScorer, bias_row, default_tile_rows
from llmppo.testing.models import tiny_model

FAMILIES = [("qwen2", True), ("qwen2", False), ("llama", False), ("gemma2", True), ("cohere", True)]


def model_and_hidden(family="qwen2", tied=True):
    model = tiny_model(family=family, tied=tied, hidden=16, heads=2, kv_heads=1, vocab_size=40)
    model.requires_grad_(False)
    ids = torch.randint(0, 40, (3, 6), generator=torch.Generator().manual_seed(1))
    hidden = model.get_decoder()(input_ids=ids).last_hidden_state.reshape(-1, 16)
    logits = model(input_ids=ids).logits.float().reshape(-1, 40)
    return model, hidden, logits, ids.reshape(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_equals_full_logits(family, tied, temperature):
    """Soft-capped (Gemma 2), scaled (Cohere), tied and untied heads."""
    model, hidden, logits, tokens = model_and_hidden(family, tied)
    scorer = TokenScorer(OutputHead(model), temperature=temperature, tile_rows=7)
    expected = Categorical(logits=logits / temperature)
    logps, entropies = scorer(hidden, tokens)
    assert logps.dtype == entropies.dtype == torch.float32
    torch.testing.assert_close(logps, expected.log_prob(tokens), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected.entropy(), rtol=1e-5, atol=1e-5)


def test_the_soft_cap_and_the_scale_matter():
    """Without them the numbers would be others, so the test above can fail."""
    for family, name, neutral in (("gemma2", "soft_cap", None), ("cohere", "scale", 1.0)):
        model, hidden, _, tokens = model_and_hidden(family)
        head = OutputHead(model)
        right, _ = TokenScorer(head)(hidden, tokens)
        setattr(head, name, neutral)
        wrong, _ = TokenScorer(head)(hidden, tokens)
        assert (right - wrong).abs().max() > 0.1


@pytest.mark.parametrize("tile_rows", [1, 4, 1000])
def test_gradient_of_a_tiled_pass_is_that_of_full_logits(tile_rows):
    model, hidden, _, tokens = model_and_hidden("gemma2")
    bias = {3: 0.7, 5: -20.0}
    offsets = torch.zeros(40)
    offsets[3], offsets[5] = 0.7, -20.0
    ours, theirs = hidden.clone().requires_grad_(True), hidden.clone().requires_grad_(True)
    logps, entropies = TokenScorer(OutputHead(model), temperature=1.5, logit_bias=bias, tile_rows=tile_rows)(
        ours, tokens
    )
    (logps.sum() + 0.3 * entropies.sum()).backward()
    capped = 5.0 * torch.tanh(model.get_output_embeddings()(theirs) / 5.0)
    full = Categorical(logits=capped / 1.5 + offsets)
    (full.log_prob(tokens).sum() + 0.3 * full.entropy().sum()).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert model.get_output_embeddings().weight.grad is None


def test_logit_bias_comes_after_the_temperature():
    """As in sampling: softmax(logits / temperature + bias)."""
    model, hidden, logits, tokens = model_and_hidden()
    offsets = torch.zeros(40)
    offsets[tokens[0]] = 2.0
    ours, _ = TokenScorer(OutputHead(model), temperature=0.5, logit_bias={int(tokens[0]): 2.0})(
        hidden, tokens
    )
    torch.testing.assert_close(
        ours, Categorical(logits=logits / 0.5 + offsets).log_prob(tokens), rtol=1e-5, atol=1e-5
    )


def test_supports_restrict_the_softmax():
    """Padded with -1; a row of -1 alone is unrestricted; a token outside its support has probability 0."""
    model, hidden, logits, tokens = model_and_hidden()
    hidden, logits = hidden[:4], logits[:4]
    tokens = torch.tensor([3, 8, 1, 2])
    supports = torch.tensor([[3, 7, -1, -1], [8, 0, 5, -1], [-1, -1, -1, -1], [3, 4, -1, -1]])
    logps, entropies = TokenScorer(OutputHead(model), tile_rows=3)(hidden, tokens, supports)
    first = torch.log_softmax(logits[0, [3, 7]], 0)
    assert float(logps[0]) == pytest.approx(float(first[0]), rel=1e-5)
    assert float(entropies[0]) == pytest.approx(float(-(first.exp() * first).sum()), rel=1e-4)
    assert float(logps[1]) == pytest.approx(float(torch.log_softmax(logits[1, [8, 0, 5]], 0)[0]), rel=1e-5)
    ours, _ = TokenScorer(OutputHead(model))(hidden[1:2], torch.tensor([0]), supports[1:2])
    assert float(ours[0]) == pytest.approx(float(torch.log_softmax(logits[1, [8, 0, 5]], 0)[1]), rel=1e-5)
    assert float(logps[2]) == pytest.approx(float(torch.log_softmax(logits[2], 0)[1]), rel=1e-5)
    assert float(logps[3]) == -math.inf
    assert torch.isfinite(entropies).all()


def test_gradient_under_a_support_is_finite_and_stays_inside():
    model, hidden, _, _ = model_and_hidden()
    weights = torch.nn.Parameter(hidden[:2].clone())
    supports = torch.tensor([[3, 7], [1, -1]])
    logps, entropies = TokenScorer(OutputHead(model))(weights, torch.tensor([3, 1]), supports)
    assert float(logps[1].detach()) == 0.0  # the only candidate
    (logps.sum() + entropies.sum()).backward()
    assert torch.isfinite(weights.grad).all()
    assert weights.grad[0].abs().sum() > 0
    assert not weights.grad[1].any()


def test_entropies_that_need_no_gradient_are_not_computed_again():
    """Where only the log-probs go into the loss, the backward pass recomputes a tile as far as they need it."""
    model, hidden, _, tokens = model_and_hidden()
    found, exponentials = [], []

    class Exponentials(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            exponentials.append(function is torch.ops.aten.exp.default)
            return function(*args, **(kwargs or {}))

    for entropy_gradient, computed in ((True, 2), (False, 1)):
        states = hidden.detach().requires_grad_(True)
        exponentials.clear()
        with Exponentials():
            logps, entropies = TokenScorer(OutputHead(model), entropy_gradient=entropy_gradient)(
                states, tokens
            )
            logps.sum().backward()
        assert sum(exponentials) == computed
        assert entropies.requires_grad is entropy_gradient
        found.append((logps.detach(), entropies.detach(), states.grad))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    alone, nothing = TokenScorer(OutputHead(model))(hidden, tokens, entropy=False)
    assert torch.equal(alone, found[0][0])
    assert nothing is None


def test_no_rows():
    model, hidden, _, tokens = model_and_hidden()
    logps, entropies = TokenScorer(OutputHead(model))(hidden[:0], tokens[:0])
    assert logps.shape == entropies.shape == (0,)


def test_storage_is_fp32_and_so_is_the_reduction_unless_switched_off():
    model, hidden, _, tokens = model_and_hidden()
    model, hidden = model.bfloat16(), hidden.bfloat16()
    exact, _ = TokenScorer(OutputHead(model))(hidden, tokens)
    coarse, entropy = TokenScorer(OutputHead(model), reduce_in_fp32=False)(hidden, tokens)
    assert exact.dtype == coarse.dtype == entropy.dtype == torch.float32
    assert torch.equal(coarse, coarse.bfloat16().float())  # eight bits of mantissa
    assert not torch.equal(exact, exact.bfloat16().float())
    torch.testing.assert_close(coarse, exact, rtol=0.05, atol=0.1)


def test_tiles_hold_at_most_a_quarter_gibibyte():
    assert default_tile_rows(1000) == 4096
    assert default_tile_rows(49_152) * 49_152 * 4 <= 32 * 2**20
    assert default_tile_rows(150_000) * 150_000 * 4 <= 256 * 2**20
    assert default_tile_rows(10**7) == 128


def test_a_bias_for_an_id_outside_the_vocabulary_is_refused():
    assert bias_row({1: 0.5}, 3).tolist() == [0.0, 0.5, 0.0]
    with pytest.raises(ConfigError, match="logit_bias: no token 3; the model's ids are 0 to 2"):
        bias_row({3: 1.0}, 3)
