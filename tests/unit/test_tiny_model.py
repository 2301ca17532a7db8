import random
import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from llmppo.config import TinyModelConfig, WarmStartConfig
from llmppo.envs.guess_number import demonstration
from llmppo.errors import ConfigError, NonFiniteError
from llmppo.models.tiny import SPECIAL_TOKENS, build_model, build_tokenizer, learn_merges
from llmppo.models.warm_start import DialogueEncoder, dialogues, learning_rate, warm_start

SMALL = TinyModelConfig(kind="tiny", hidden_size=16, layers=2, heads=2, kv_heads=1, intermediate_size=32)


def game_texts():
    rng = random.Random(0)
    return [text for _ in range(200) for exchange in demonstration(rng) for text in exchange]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(learn_merges(game_texts(), limit=64))


def test_merges_by_hand():
    # ab stands three times, everything else once.
    assert learn_merges(["abab", "abc"], limit=64) == [("a", "b")]
    # Words: ab, Ġcd, Ġab, Ġcd. Pairs ab, cd and Ġc come twice; then Ġcd does, and Ġab doesn't.
    assert learn_merges(["ab cd ab cd"], limit=64) == [("a", "b"), ("c", "d"), ("Ġ", "cd")]
    assert learn_merges(["abababab"], limit=1) == [("a", "b")]
    assert learn_merges(["1111 [[]] [[]]"], limit=64) == []  # digits and brackets stand alone


def test_the_words_of_the_task_are_single_tokens(tokenizer):
    assert 280 <= len(tokenizer) <= 320
    assert tokenizer.tokenize("Guess my number from 1 to 15 in 4 tries.") == (
        ["Guess", "Ġmy", "Ġnumber", "Ġfrom", "Ġ", "1", "Ġto", "Ġ", "1", "5", "Ġin", "Ġ", "4", "Ġtries", "."]
    )
    assert tokenizer.tokenize("Higher.Lower.Invalid.") == ["Higher", ".", "Lower", ".", "Invalid", "."]
    assert tokenizer.tokenize("[12]<|end|>") == ["[", "1", "2", "]", "<|end|>"]
    assert tokenizer.tokenize("(3)]}") == ["(", "3", ")", "]", "}"]


@given(st.text())
def test_every_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_reloading_gives_the_same_tokenizer(tokenizer, tmp_path):
    build_model(SMALL, tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert (again.chat_template, len(again)) == (tokenizer.chat_template, len(tokenizer))


def test_special_tokens_have_the_first_ids(tokenizer):
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (
        "<|endoftext|>",
        "<|end|>",
        None,
    )
    ids = tokenizer.encode("<|user|>a<|end|>")
    assert ids == [3, *tokenizer.encode("a"), 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_the_chat_template(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi "},
        {"role": "assistant", "content": "[1]"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|system|>Be brief.<|end|><|user|> Hi <|end|><|assistant|>[1]<|end|>"
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    assert rendered == prompt + "[1]<|end|>"
    with pytest.raises(Exception, match="system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_dialogues_are_encoded_as_the_template_renders_them(tokenizer):
    encode = DialogueEncoder(tokenizer)
    rng = random.Random(1)
    for _ in range(50):
        dialogue = demonstration(rng)
        ids, replies = encode(dialogue)
        messages = [
            {"role": role, "content": text}
            for exchange in dialogue
            for role, text in zip(("user", "assistant"), exchange, strict=True)
        ]
        assert ids == tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        marked = [token for token, is_reply in zip(ids, replies, strict=True) if is_reply]
        assert tokenizer.decode(marked) == "".join(f"{action}<|end|>" for _, action in dialogue)


def test_weights_follow_the_seed_and_leave_the_global_generator_alone(tokenizer):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = (build_model(SMALL, tokenizer, seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.lm_head.weight is first.model.embed_tokens.weight
    assert (first.config.eos_token_id, first.generation_config.eos_token_id) == (1, 1)
    assert (first.config.pad_token_id, first.generation_config.pad_token_id) == (0, 0)


def test_the_default_size(tokenizer):
    model = build_model(TinyModelConfig(kind="tiny"), tokenizer, 0)
    # Embeddings, then by layer: q, k and v with bias, o, three of the feed-forward layer, two norms; a last norm.
    layer = (96 * 96 + 96) + 2 * (96 * 48 + 48) + 96 * 96 + 3 * 96 * 256 + 2 * 96
    assert sum(p.numel() for p in model.parameters()) == len(tokenizer) * 96 + 2 * layer + 96


def test_the_learning_rate_rises_then_follows_half_a_cosine():
    config = WarmStartConfig(steps=1000, learning_rate=1.0)
    assert learning_rate(config, 0) == pytest.approx(1 / 50)
    assert learning_rate(config, 500) == pytest.approx(0.5)
    assert learning_rate(config, 250) == pytest.approx(0.5 * (1 + 0.5**0.5))
    assert 0 < learning_rate(config, 999) < 1e-5


def train(tokenizer, seed=0, **options):
    config = WarmStartConfig(**{"steps": 60, "batch_size": 4, "learning_rate": 0.02, **options})
    model = build_model(SMALL, tokenizer, seed)
    lines = []
    loss = warm_start(model, tokenizer, config, seed, lines.append)
    return model, loss


def test_a_warm_start_learns_and_repeats_exactly(tokenizer):
    model, loss = train(tokenizer)
    _, early = train(tokenizer, steps=1)
    assert loss < 0.5 * early
    again, loss_again = train(tokenizer)
    assert loss_again == loss
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_environment_text_counts_by_its_weight(tokenizer):
    """With weight 0 the feedback words stay as unlikely as before training; with weight 1 they are learnt."""
    higher = tokenizer.convert_tokens_to_ids("Higher")
    prompt = torch.tensor([tokenizer.encode("<|user|>Guess<|end|><|assistant|>[7]<|end|><|user|>")])
    logprobs = {}
    for weight in (0.0, 1.0):
        model, _ = train(tokenizer, environment_loss_weight=weight)
        with torch.no_grad():
            logprobs[weight] = model(prompt).logits[0, -1].log_softmax(-1)[higher].item()
    assert logprobs[1.0] > logprobs[0.0] + 3


def no_dialogue(rng):
    return repr(rng)


def test_faults_name_their_key(tokenizer):
    with pytest.raises(NonFiniteError, match="learning_rate"):
        train(tokenizer, learning_rate=1e15)
    with pytest.raises(ConfigError, match=r"warm_start\.dialogues: .*:no_dialogue returned"):
        next(dialogues(WarmStartConfig(dialogues=f"{__name__}:no_dialogue"), "x"))
    short = SMALL.model_copy(update={"max_positions": 20})
    model = build_model(short, tokenizer, 0)
    with pytest.raises(ConfigError, match="max_positions: 20, but a warm-start dialogue has"):
        warm_start(model, tokenizer, WarmStartConfig(steps=1), 0, print)
