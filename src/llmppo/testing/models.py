"""`tiny_tokenizer` and `tiny_model`: real transformers classes, small enough for a test.

The tokenizer is a byte-level BPE with a handful of merges, so that any text has ids and token boundaries
move with context as they do in real vocabularies. Its ids are below 320, the models' default vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Literal

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MERGED_WORDS = ("user", "assistant", "system", "model", "Ġthe", "ing", "He", "llo", "\u010a\u010a")
VOCABULARY = 320
Family = Literal["qwen2", "llama", "gemma2", "cohere"]


def tiny_tokenizer(
    chat_template: str | None = CHATML,
    *,
    special_tokens: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos_token: str | None = None,
    eos_token: str = "<|im_end|>",
    pad_token: str = "<|endoftext|>",
    add_bos: bool = False,
) -> Any:
    """A `PreTrainedTokenizerFast`; `add_bos` makes plain encoding put the BOS token first."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = []
    for word in MERGED_WORDS:
        for length in range(2, len(word) + 1):
            pair = (word[: length - 1], word[length - 1])
            if pair not in merges:
                merges.append(pair)
                vocab[word[:length]] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special_tokens]
    )
    if add_bos:
        assert bos_token is not None, "add_bos needs bos_token"
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, backend.token_to_id(bos_token))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos_token, eos_token=eos_token, pad_token=pad_token
    )
    tokenizer.chat_template = chat_template
    assert len(tokenizer) <= VOCABULARY, len(tokenizer)
    return tokenizer


def tiny_model(
    seed: int = 0,
    layers: int = 2,
    hidden: int = 32,
    *,
    family: Family = "qwen2",
    heads: int = 4,
    kv_heads: int = 2,
    intermediate: int | None = None,
    vocab_size: int = VOCABULARY,
    max_positions: int = 1024,
    tied: bool = True,
    **config: Any,
) -> Any:
    """A random causal LM in eval mode, fp32. Weights are drawn wide, so that logits aren't all alike.

    `gemma2` soft-caps its logits, `cohere` scales them; further keywords go to the config class.
    """
    import torch
    import transformers

    prefix = {"qwen2": "Qwen2", "llama": "Llama", "gemma2": "Gemma2", "cohere": "Cohere"}[family]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "gemma2":
        settings |= {"head_dim": hidden // heads, "final_logit_softcapping": 5.0}
    if family == "cohere":
        settings |= {"logit_scale": 0.25}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model_config = getattr(transformers, f"{prefix}Config")(**(settings | config))
        model = getattr(transformers, f"{prefix}ForCausalLM")(model_config)
    return model.float().eval()
