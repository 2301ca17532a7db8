"""The transformers engine: log-probs of the policy, draws that depend on the request alone, one step a token."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from llmppo.config import SamplingConfig
from llmppo.engines.base import GenerationRequest
from llmppo.engines.hf import HFEngine, hf_forward
from llmppo.engines.kept import KeptCache
from llmppo.engines.sampling import UniformStreams, draw, penalize_repetition, restrict
from llmppo.engines.stops import StopStrings
from llmppo.errors import ConfigError, NonFiniteError
from llmppo.testing import tiny_model, tiny_tokenizer
from llmppo.trajectories.episode import StopReason

END = 287
FAMILIES = {
    "qwen2": {},
    "untied": {"tied": False},
    "llama": {"family": "llama"},
    "gemma2": {"family": "gemma2", "sliding_window": 8},
    "cohere": {"family": "cohere"},
}
MODELS = {name: tiny_model(seed=1, **settings) for name, settings in FAMILIES.items()}
MODEL = MODELS["qwen2"]


def engine(model=MODEL, end=(END,), **settings):
    return HFEngine(hf_forward(model), end, **settings)


def requests(*lengths, most=12, fewest=0):
    noise = np.random.default_rng(0)
    return [
        GenerationRequest(
            token_ids=noise.integers(0, 256, length).tolist(),
            seed=1000 + number,
            max_new_tokens=most + number % 3,
            min_new_tokens=fewest,
        )
        for number, length in enumerate(lengths)
    ]


def full_scores(model, request, generation):
    """[n, V] log-softmax-able logits of each sampled token from one forward without cache or padding."""
    ids = [*request.token_ids, *generation.token_ids]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float()
    return logits[len(request.token_ids) - 1 : -1]


def full_logprobs(model, request, generation, temperature=1.0, bias=None):
    scores = full_scores(model, request, generation) / temperature
    if bias is not None:
        scores = scores + bias
    return scores.log_softmax(-1)[range(len(generation.token_ids)), generation.token_ids].numpy()


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_those_of_a_full_forward(name):
    """Padding, cache, compaction, soft-cap, logit scale and sliding windows change nothing."""
    batch = requests(3, 17, 9, 1, 30, 5)
    generations = engine(MODELS[name], end=range(0, 320, 8)).generate(batch)
    assert len({len(generation.token_ids) for generation in generations}) > 1
    for request, generation in zip(batch, generations, strict=True):
        np.testing.assert_allclose(
            generation.logprobs, full_logprobs(MODELS[name], request, generation), atol=1e-5
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_logprobs_are_at_the_temperature_with_the_bias(temperature):
    batch = requests(4, 9)
    bias = torch.zeros(320)
    bias[7], bias[9] = 3.0, -2.0
    generations = engine(temperature=temperature, logit_bias={7: 3.0, 9: -2.0}).generate(batch)
    for request, generation in zip(batch, generations, strict=True):
        expected = full_logprobs(MODEL, request, generation, temperature, bias)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.8, "min_p": 0.1}]
)
def test_a_logprob_is_that_of_what_the_token_was_drawn_from(settings):
    batch = requests(4, 9, 12)
    generations = engine(temperature=0.7, **settings).generate(batch)
    for request, generation in zip(batch, generations, strict=True):
        allowed = restrict(full_scores(MODEL, request, generation) / 0.7, **settings)
        tokens = torch.tensor(generation.token_ids)[:, None]
        expected = allowed.log_softmax(-1).gather(1, tokens).squeeze(1)
        np.testing.assert_allclose(generation.logprobs, expected, atol=1e-5)
        assert len(generation.supports) == len(generation.token_ids)
        for support, row in zip(generation.supports, allowed, strict=True):
            assert support.tolist() == torch.isfinite(row).nonzero().squeeze(1).tolist()


def test_what_has_no_support_is_drawn_at_its_own_logprob():
    """The penalty and the minimum length change the distribution without a list of tokens."""
    batch = requests(4, 9, fewest=3)
    for request, generation in zip(
        batch, engine(end=range(0, 320, 2), repetition_penalty=1.8).generate(batch), strict=True
    ):
        assert generation.supports is None
        scores = full_scores(MODEL, request, generation)
        for step, (token, logprob) in enumerate(zip(generation.token_ids, generation.logprobs, strict=True)):
            seen = torch.zeros(1, 320, dtype=torch.bool)
            seen[0, [*request.token_ids, *generation.token_ids[:step]]] = True
            row = penalize_repetition(scores[step][None], seen, 1.8)[0]
            if step < 3:
                row[0::2] = -torch.inf
            assert logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-5)


def test_greedy_logprobs_are_the_policys():
    batch = requests(4, 9)
    for request, generation in zip(
        batch, engine(temperature=0.7, top_k=2).generate(batch, greedy=True), strict=True
    ):
        assert generation.supports is None
        np.testing.assert_allclose(
            generation.logprobs, full_logprobs(MODEL, request, generation, 0.7), atol=1e-5
        )


def test_top_k_draws_among_the_k_likeliest():
    batch = requests(4, 9, 12, most=40)
    for request, generation in zip(batch, engine(end=(), top_k=3).generate(batch), strict=True):
        likeliest = full_scores(MODEL, request, generation).topk(3).indices.numpy()
        assert all(token in row for token, row in zip(generation.token_ids, likeliest, strict=True))


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.5, "top_p": 0.9}])
def test_a_request_gives_the_same_reply_alone_and_in_a_batch(greedy, settings):
    batch = requests(3, 17, 9, 1, 30, 5, 8, 8, most=40)
    ends = range(0, 320, 40)
    together = engine(end=ends, **settings).generate(batch, greedy=greedy)
    chunked = engine(end=ends, chunk_size=3, **settings).generate(batch, greedy=greedy)
    alone = [engine(end=ends, **settings).generate([request], greedy=greedy)[0] for request in batch]
    for first, second, third in zip(together, chunked, alone, strict=True):
        assert first.token_ids == second.token_ids == third.token_ids
        assert first.stop_reason == second.stop_reason == third.stop_reason
        np.testing.assert_allclose(first.logprobs, third.logprobs, atol=1e-5)


def test_draws_depend_on_the_seed_and_not_on_the_process():
    (request,) = requests(6)
    torch.manual_seed(0)
    first = engine().generate([request])[0]
    torch.rand(100)
    state = torch.get_rng_state()
    second = engine().generate([request])[0]
    assert first.token_ids == second.token_ids
    assert torch.equal(torch.get_rng_state(), state)
    other = GenerationRequest(token_ids=request.token_ids, seed=request.seed + 2**32, max_new_tokens=12)
    assert engine().generate([other])[0].token_ids != first.token_ids


def test_a_longer_limit_continues_the_same_reply():
    (request,) = requests(6)
    longer = GenerationRequest(token_ids=request.token_ids, seed=request.seed, max_new_tokens=150)
    short, long = engine(end=()).generate([request])[0], engine(end=()).generate([longer])[0]
    assert long.token_ids[: len(short.token_ids)] == short.token_ids
    assert len(long.token_ids) == 150


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_equals_transformers(name):
    batch = requests(3, 17, 9)
    for request, generation in zip(batch, engine(MODELS[name]).generate(batch, greedy=True), strict=True):
        ids = torch.tensor([request.token_ids])
        expected = MODELS[name].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=request.max_new_tokens,
            eos_token_id=END,
            pad_token_id=0,
        )
        assert generation.token_ids == expected[0, len(request.token_ids) :].tolist()


def test_stop_reasons_and_the_end_token():
    """Every token an end token: one-token replies that hold it. None: replies as long as allowed."""
    batch = requests(4, 9)
    for generation in engine(end=range(320)).generate(batch):
        assert (len(generation.token_ids), generation.stop_reason) == (1, StopReason.EOS)
    lengths = [len(generation.token_ids) for generation in engine(end=()).generate(batch)]
    assert lengths == [12, 13]
    assert {generation.stop_reason for generation in engine(end=()).generate(batch)} == {StopReason.LENGTH}
    last = engine(end=()).generate(batch)[0].token_ids[-1]
    (at_the_limit, _) = engine(end=(last,)).generate(batch)
    assert at_the_limit.stop_reason is StopReason.EOS


@pytest.mark.parametrize("greedy", [False, True])
def test_the_minimum_length_holds_end_tokens_back(greedy):
    ends = range(0, 320, 2)
    for generation in engine(end=ends).generate(requests(4, 9, 5, fewest=6), greedy=greedy):
        assert len(generation.token_ids) >= 6
        assert not any(token in ends for token in generation.token_ids[:5])


def test_a_call_takes_as_many_steps_as_its_longest_reply():
    running = engine(end=range(0, 320, 8))
    generations = running.generate(requests(3, 17, 9, 1, 30, 5))
    assert running.decode_steps == max(len(generation.token_ids) for generation in generations)
    assert running.generate([]) == []


class CountingForward:
    def __init__(self, inner):
        self.inner, self.rows, self.tokens = inner, [], 0

    def new_cache(self):
        return self.inner.new_cache()

    def __call__(self, input_ids, attention_mask, position_ids, cache):
        self.rows.append(len(input_ids))
        self.tokens += input_ids.numel()
        assert attention_mask.shape[1] == cache.get_seq_length() + input_ids.shape[1]
        assert position_ids.shape == input_ids.shape
        return self.inner(input_ids, attention_mask, position_ids, cache)


def test_finished_rows_leave_the_batch_and_positions_stay_inside_the_reply():
    forward = CountingForward(hf_forward(MODEL))
    batch = [
        GenerationRequest(token_ids=[5, 6 + number], seed=number, max_new_tokens=most)
        for number, most in enumerate([1, 1, 2, 9])
    ]
    replies = HFEngine(forward, ()).generate(batch)
    assert [len(reply.token_ids) for reply in replies] == [1, 1, 2, 9]
    assert forward.rows == [4, 2, *[1] * 7]


def test_equal_prompts_run_once():
    forward = CountingForward(hf_forward(MODEL))
    batch = [
        GenerationRequest(token_ids=prompt, seed=number, max_new_tokens=7)
        for number, prompt in enumerate([[5, 6, 7], [9], [5, 6, 7], [9], [5, 6, 7]])
    ]
    shared = HFEngine(forward, (END,)).generate(batch)
    assert forward.rows[:2] == [2, 5]
    assert forward.tokens < 2 * 3 + 5 * 7
    for reply, alone in zip(shared, engine(chunk_size=1).generate(batch), strict=True):
        assert reply.token_ids == alone.token_ids
        np.testing.assert_allclose(reply.logprobs, alone.logprobs, atol=1e-5)
    assert len({tuple(reply.token_ids) for reply in shared}) > 2


def conversation(model, keep, turns=3):
    """Replies of `turns` turns to transcripts of different lengths, and the tokens that the model ran in the last."""
    forward = CountingForward(hf_forward(model))
    running = HFEngine(forward, range(0, 320, 8))
    transcripts = [[5, 6], [7], [5, 6], [9, 10, 11, 12, 13, 14]]
    caches = [KeptCache() if keep else None for _ in transcripts]
    replies = []
    for turn in range(turns):
        forward.tokens = 0
        batch = [
            GenerationRequest(token_ids=ids, seed=10 * turn + row, max_new_tokens=6, kept=cache)
            for row, (ids, cache) in enumerate(zip(transcripts, caches, strict=True))
        ]
        replies += running.generate(batch)
        transcripts = [
            [*ids, *reply.token_ids, *range(20, 22 + row)]
            for row, (ids, reply) in enumerate(zip(transcripts, replies[-4:], strict=True))
        ]
    return replies, forward.tokens


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_a_kept_cache_changes_no_reply_and_saves_the_transcript(family):
    """The sliding window of Gemma drops positions, so its caches aren't kept."""
    model = MODEL if family == "qwen2" else MODELS["gemma2"]
    (kept, few), (fresh, many) = conversation(model, keep=True), conversation(model, keep=False)
    for with_cache, without in zip(kept, fresh, strict=True):
        assert with_cache.token_ids == without.token_ids
        np.testing.assert_allclose(with_cache.logprobs, without.logprobs, atol=1e-5)
    if family == "qwen2":
        assert many - few >= 20
    else:
        assert many == few


def test_a_kept_cache_of_another_transcript_is_not_used():
    cache = KeptCache()
    (before,) = engine().generate([GenerationRequest(token_ids=[5, 6], seed=1, max_new_tokens=3, kept=cache)])
    held = list(cache.token_ids)
    assert held == [5, 6, *before.token_ids[:-1]]
    request = GenerationRequest(token_ids=[5, 9, *held], seed=2, max_new_tokens=5)
    (expected,) = engine().generate([request])
    assert not cache.usable(request.token_ids)
    assert not cache.usable(held)  # nothing would be left to run
    (found,) = engine().generate([replace(request, kept=cache)])
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)


def test_a_read_only_cache_is_left_as_it_is():
    cache = KeptCache(read_only=True)
    engine().generate([GenerationRequest(token_ids=[5, 6], seed=1, max_new_tokens=3, kept=cache)])
    assert (cache.token_ids, cache.layers) == ([], [])


TOKENIZER = tiny_tokenizer()


@pytest.mark.parametrize("fewest", [0, 6])
def test_a_stop_string_ends_the_reply_with_the_token_that_completes_it(fewest):
    """Against the replies without stop strings, cut where their decoded beginning first ends in one."""
    stop = ["a", "\u00e9", "ing"]
    likely = {token: 3.0 for text in stop for token in TOKENIZER.encode(text)}
    batch = requests(4, 9, 5, 3, 7, 12, most=20, fewest=fewest)
    reasons = set()
    whole = engine(logit_bias=likely).generate(batch)
    stops = StopStrings(stop, TOKENIZER)
    cut = engine(logit_bias=likely, stops=stops, chunk_size=3).generate(batch)
    for long, short in zip(whole, cut, strict=True):
        length = next(
            (n for n in range(max(1, fewest), len(long.token_ids) + 1) if spells(long.token_ids[:n], stop)),
            None,
        )
        assert short.token_ids == long.token_ids[:length]
        np.testing.assert_allclose(short.logprobs, long.logprobs[:length], atol=1e-5)
        ended = short.token_ids[-1] == END
        assert short.stop_reason is (
            StopReason.EOS if ended else StopReason.STOP if length else StopReason.LENGTH
        )
        reasons.add(short.stop_reason)
    assert StopReason.STOP in reasons


def spells(ids, stop):
    """Whether the text of `ids` holds one more stop string than without the last token."""
    counts = [[TOKENIZER.decode(part).count(text) for text in stop] for part in (ids, ids[:-1])]
    return any(now > before for now, before in zip(*counts, strict=True))


@pytest.mark.parametrize(
    ("pieces", "completed"),
    [
        (["St", "op"], True),
        (["Stop"], True),
        (["a Stop here"], True),
        (["Stop", " here"], False),  # it was complete before
        (["St", "o"], False),
        (["\n", "\n"], True),
        (["x\n", "\nStop"], True),
        (["\u20ac"], True),
    ],
)
def test_stop_strings_across_tokens(pieces, completed):
    """Pieces as single tokens of a made-up vocabulary, and the bytes of a character as tokens of their own."""
    stops = StopStrings(["Stop", "\n\n", "\u20ac"], TOKENIZER)
    if pieces == ["\u20ac"]:
        ids = TOKENIZER.encode("x\u20ac")
        assert [stops.completed(ids[:n]) for n in range(1, 5)] == [False, False, False, True]
        return

    class Pieces:
        def decode(self, ids, **_):
            return "".join(pieces[number] for number in ids)

    assert StopStrings(["Stop", "\n\n"], Pieces()).completed(range(len(pieces))) is completed


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(ConfigError, match="listen_for_end_of"):
        HFEngine.from_config(hf_forward(MODEL), (END,), SamplingConfig(stop=["\n"]))
    with pytest.raises(ValueError, match="at least 1 character"):
        SamplingConfig(stop=[""])


def test_the_settings_of_a_config_reach_the_engine():
    config = SamplingConfig(temperature=0.5, top_k=4, logit_bias={7: 1.0}, hf_generate_chunk_size=2)
    batch = requests(4, 9, 5)
    expected = engine(temperature=0.5, top_k=4, logit_bias={7: 1.0}).generate(batch)
    running = HFEngine.from_config(hf_forward(MODEL), (END,), config)
    assert [g.token_ids for g in running.generate(batch)] == [g.token_ids for g in expected]
    assert running.decode_steps > max(len(g.token_ids) for g in expected)


def test_faults_are_named():
    with pytest.raises(ValueError, match="no tokens"):
        engine().generate([GenerationRequest(token_ids=[], seed=0, max_new_tokens=1)])
    broken = tiny_model(seed=2)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="token 0 of reply 0"):
        engine(broken).generate(requests(3))
    with pytest.raises(ValueError, match=r"model\.eval"):
        engine(tiny_model().train()).generate(requests(3))


def test_uniform_streams_are_their_seeds():
    both = UniformStreams([5, 2**62])
    first, second = both.block(), both.block()
    alone = UniformStreams([2**62])
    assert torch.equal(alone.block()[0], first[1])
    both.keep([1])
    assert torch.equal(torch.stack([alone.block(), alone.block()]), torch.stack([second[1:], both.block()]))


def test_draws_follow_the_distribution():
    """On a regular grid of uniforms each token's share is its probability to within one grid step."""
    probabilities = torch.tensor([0.1, 0.0, 0.25, 0.6, 0.05, 0.0])
    uniforms = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    drawn = draw(probabilities.log().expand(1000, -1), uniforms)
    shares = torch.bincount(drawn, minlength=6) / 1000
    assert (shares - probabilities).abs().max() <= 1e-3


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("size", [3, 1000])
def test_a_token_of_weight_zero_is_never_drawn(uniform, size):
    scores = torch.full((1, size), -torch.inf)
    scores[0, [size // 2, size // 2 + 1]] = torch.tensor([0.0, -20.0])
    assert draw(scores, torch.tensor([uniform], dtype=torch.float64)).item() in (size // 2, size // 2 + 1)


def test_filters_by_hand():
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def kept(**settings):
        return torch.isfinite(restrict(scores, **settings))[0].tolist()

    assert kept() == [True, True, True, True]
    assert kept(top_k=2) == [True, True, False, False]
    assert kept(top_k=4) == [True, True, True, True]
    assert kept(top_p=0.1) == [True, False, False, False]
    assert kept(top_p=0.75) == [True, True, False, False]  # 0.5 < 0.75, so the second belongs; 0.8 is past it
    assert kept(min_p=0.2) == [True, True, True, False]  # 0.2 * 0.5 = 0.1
    assert kept(top_k=3, top_p=0.6, min_p=0.7) == [True, False, False, False]


def test_the_repetition_penalty_by_hand():
    logits, seen = torch.tensor([[2.0, -2.0, 3.0]]), torch.tensor([[True, True, False]])
    assert penalize_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 3.0]]
