"""A tiny causal language model in Hugging Face format: Qwen2 architecture, byte-level tokenizer, chat template.

The tokenizer covers every text (256 byte symbols) and learns a few merges, so that the words of a task become
single tokens; digits and brackets always stand alone. Everything is a function of the arguments: the same
seed gives the same bytes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from llmppo.config import TinyModelConfig

SPECIAL_TOKENS = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
  {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
    {{- raise_exception('this chat template knows the roles system, user and assistant') -}}
  {%- endif -%}
  {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""
BRACKETS = r"[\[\](){}]"
INITIALIZER_RANGE = 0.05  # wider than Qwen2's 0.02, with which so narrow a model learns more slowly


def _words(text: str) -> list[str]:
    """Pieces of a text, in byte symbols, that merges never cross."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(BRACKETS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return [word for word, _ in split.pre_tokenize_str(text)]


def learn_merges(texts: Iterable[str], limit: int) -> list[tuple[str, str]]:
    """Byte-pair merges of the most frequent neighbours; ties go to the pair that sorts first.

    Stops at `limit` merges or when no pair occurs twice.
    """
    occurrences = Counter(texts)
    counts: Counter[str] = Counter()
    for text, times in occurrences.items():
        for word in _words(text):
            counts[word] += times
    words = {word: list(word) for word in counts}
    merges: list[tuple[str, str]] = []
    while len(merges) < limit:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, symbols in words.items():
            for pair in pairwise(symbols):
                pairs[pair] += counts[word]
        frequent = [pair for pair, count in pairs.items() if count > 1]
        if not frequent:
            break
        best = min(frequent, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for symbols in words.values():
            _merge(symbols, best)
    return merges


def _merge(symbols: list[str], pair: tuple[str, str]) -> None:
    index = 0
    while index < len(symbols) - 1:
        if (symbols[index], symbols[index + 1]) == pair:
            symbols[index : index + 2] = ["".join(pair)]
        index += 1


def build_tokenizer(merges: Sequence[tuple[str, str]], max_positions: int = 1024) -> Any:
    """A fast tokenizer: special tokens first, then the 256 byte symbols, then the merges.

    It is a `Qwen2Tokenizer`, because that is what `AutoTokenizer` makes of the files of a Qwen2 model
    whatever class they name.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    symbols = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    symbols += ["".join(pair) for pair in merges]
    return Qwen2Tokenizer(
        vocab={symbol: index for index, symbol in enumerate(dict.fromkeys(symbols))},
        merges=list(merges),
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|end|>",
        extra_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
        model_max_length=max_positions,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(config: TinyModelConfig, tokenizer: Any, seed: int) -> Any:
    """A `Qwen2ForCausalLM` in fp32 with tied embeddings, its weights drawn from `seed`."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ends = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    model_config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_positions,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(model_config).float()
    model.generation_config = GenerationConfig(**ends)
    return model
