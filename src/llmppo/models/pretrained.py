"""A base model from a local directory or the hub, loaded in the data type that the config asks for."""

import os
from typing import Any

from llmppo.config import PretrainedModelConfig
from llmppo.errors import ConfigError, reading


def load_pretrained(config: PretrainedModelConfig) -> tuple[Any, Any]:
    """Model and tokenizer. Raises ConfigError where they can't be had, with the way out.

    Weights are taken from safetensors only: the older formats are pickles, which may hold code.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fault = path_fault(config.path)
    if fault is not None:
        raise ConfigError(f"base_model.path: {fault}")
    local = os.path.expanduser(config.path)
    source = local if os.path.isdir(local) else config.path
    options = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    way_out = "name a model with safetensors weights and its tokenizer"
    with reading(config.path, ConfigError, way_out):
        model = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, config.dtype), use_safetensors=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"base_model.path: the tokenizer of {config.path} has no eos_token, so no reply would end; set it in tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        # Lengths are explicit everywhere, so the end token can serve as padding.
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def path_fault(path: str) -> str | None:
    """What is wrong with a model path, as far as it can be told without loading anything; None if nothing is."""
    local = os.path.expanduser(path)
    if os.path.isdir(local) and not os.path.isfile(os.path.join(local, "config.json")):
        return f"{path} has no config.json; it isn't a model directory in Hugging Face format"
    if not os.path.isdir(local) and _looks_local(path):
        return f"there is no directory {path}; give a model directory or a hub id such as `owner/name`"
    return None


def _looks_local(path: str) -> bool:
    """Whether a path can't be a hub id, which is `name` or `owner/name`."""
    return path.startswith((".", "~", "/")) or path.count("/") > 1
