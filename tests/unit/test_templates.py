"""Framing: transcripts are what the chat template would render, without encoding anything twice."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from llmppo.envs.templates import end_token_ids, make_framer
from llmppo.errors import TemplateError
from llmppo.testing import CHATML, tiny_tokenizer

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "chat_templates"
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
EMPTY_THINKING = CHATML.replace(
    "assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
LAST_MESSAGE_ONLY = "{{ '<|im_start|>' + messages[-1]['content'] + '<|im_end|>' }}"
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('one message only') }}{% endif %}" + CHATML

LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|end_of_text|>",
)
GEMMA_TOKENS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


def published(name, **tokens):
    """A tiny tokenizer with the chat template that a model family publishes."""
    return tiny_tokenizer((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), **tokens)


def llama3():
    tokenizer = published(
        "llama-3",
        special_tokens=LLAMA3_TOKENS,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
        add_bos=True,
    )
    # As in Llama 3's own vocabulary a run of newlines is one piece, whatever follows it.
    newlines = pre_tokenizers.Split(Regex(r"[\r\n]+"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [newlines, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def gemma(name):
    return published(
        name,
        special_tokens=GEMMA_TOKENS,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        add_bos=True,
    )


def mistral():
    return tiny_tokenizer(
        MISTRAL,
        special_tokens=("<s>", "</s>"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        add_bos=True,
    )


TOKENIZERS = {
    **{name: (published(name), "<|im_end|>") for name in ("chatml", "qwen2.5", "qwen3", "smollm2")},
    "llama-3": (llama3(), "<|eot_id|>"),
    "gemma-2": (gemma("gemma-2"), "<end_of_turn>"),
    "gemma-3": (gemma("gemma-3"), "<end_of_turn>"),
}
NAMES = sorted(TOKENIZERS)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<@"), max_size=12)
plain = texts.map(str.strip)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(first=plain, turns=st.lists(st.tuples(plain, texts, st.booleans()), min_size=1, max_size=4))
def test_a_transcript_is_what_the_template_renders(name, first, turns):
    """Prompt, replies and frames decode to the rendered conversation; a cut reply gets the frame's terminator."""
    tokenizer, end_token = TOKENIZERS[name]
    framer = make_framer(tokenizer)
    end = tokenizer.convert_tokens_to_ids(end_token)
    messages = [{"role": "user", "content": first}]
    ids = list(framer.prompt(messages))
    mask = [False] * len(ids)
    sampled = []
    for reply, observation, cut in turns:
        # One id a character: a sampled sequence need not be what the tokenizer would make of its text.
        reply_ids = [
            token for character in reply for token in tokenizer.encode(character, add_special_tokens=False)
        ]
        reply_ids += [] if cut else [end]
        feedback = framer.feedback(observation, None if cut else end)
        ids += reply_ids + list(feedback)
        mask += [True] * len(reply_ids) + [False] * len(feedback)
        sampled.append(reply + ("" if cut else end_token))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": observation}]
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert tokenizer.decode(ids) == rendered
    masked = [token for token, flag in zip(ids, mask, strict=True) if flag]
    assert tokenizer.decode(masked) == "".join(sampled)


@pytest.mark.parametrize("name", NAMES)
def test_a_transcript_has_the_tokens_of_the_rendering(name):
    """Where replies are what the tokenizer makes of their text, a transcript is the rendering, token by token."""
    tokenizer, end_token = TOKENIZERS[name]
    framer, end = make_framer(tokenizer), tokenizer.convert_tokens_to_ids(end_token)
    messages = [{"role": "user", "content": "Hello the user"}]
    ids = list(framer.prompt(messages))
    for reply, observation in [("Hello", "assistant"), ("[7]", "thing.\n\nuser"), ("model", "")]:
        ids += [*tokenizer.encode(reply, add_special_tokens=False), end, *framer.feedback(observation, end)]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": observation}]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


TOOLS = [{"role": "tool", "content": "21 degrees"}, {"role": "tool", "content": "rain"}]
MIXED = [{"role": "tool", "content": "21 degrees"}, {"role": "user", "content": "And tomorrow?"}]


@pytest.mark.parametrize("answer", [TOOLS, MIXED, MIXED[1:]], ids=["tools", "tool and user", "user"])
@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "qwen3", "smollm2", "llama-3"])
def test_messages_after_a_reply_are_what_the_template_renders(name, answer):
    tokenizer, end_token = TOKENIZERS[name]
    framer, end = make_framer(tokenizer), tokenizer.convert_tokens_to_ids(end_token)
    messages = [{"role": "user", "content": "Weather?"}]
    ids = list(framer.prompt(messages))
    for reply in ("call", "it is", "so"):
        ids += [*tokenizer.encode(reply, add_special_tokens=False), end, *framer.feedback(answer, end)]
        messages += [{"role": "assistant", "content": reply}, *answer]
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )


def test_qwen_marks_tool_messages():
    tokenizer, _ = TOKENIZERS["qwen3"]
    frame = tokenizer.decode(make_framer(tokenizer).feedback(TOOLS, tokenizer.eos_token_id))
    assert frame == (
        "\n<|im_start|>user\n<tool_response>\n21 degrees\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ["gemma-2", "gemma-3"])
def test_a_template_without_tools_says_so(name):
    tokenizer, _ = TOKENIZERS[name]
    with pytest.raises(TemplateError, match=r"roles user, assistant, tool, tool.*no tool role.*plain text"):
        make_framer(tokenizer).feedback(TOOLS, None)


def test_a_template_that_drops_a_role_is_refused():
    deaf = tiny_tokenizer(CHATML.replace("{{ '<|im_start|>'", "{% if message.role != 'tool' %}{{ '<|im_start|>'", 1).replace("'\n' }}{% endfor", "'\n' }}{% endif %}{% endfor", 1))  # fmt: skip
    framer = make_framer(deaf)
    framer.feedback("b", None)
    with pytest.raises(TemplateError, match="drops a message when it renders user, assistant, tool, tool"):
        framer.feedback(TOOLS, None)


def test_think_blocks_stay_as_sampled():
    """Qwen3's template would cut the first block out of the second prompt."""
    tokenizer, _ = TOKENIZERS["qwen3"]
    framer, end = make_framer(tokenizer), tokenizer.eos_token_id
    reply = "<think>\n2 and 2\n</think>\n\n4"
    ids = [
        *framer.prompt([{"role": "user", "content": "2+2?"}]),
        *tokenizer.encode(reply, add_special_tokens=False),
        end,
        *framer.feedback("3+3?", end),
    ]
    assert tokenizer.decode(ids) == (
        f"<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n{reply}<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": reply},
        {"role": "user", "content": "3+3?"},
    ]
    assert "2 and 2" not in tokenizer.apply_chat_template(messages, tokenize=False)


def test_qwen3_without_thinking_needs_the_loose_boundary():
    tokenizer, _ = TOKENIZERS["qwen3"]
    silent = {"enable_thinking": False}
    with pytest.raises(TemplateError, match="strict_chat_template_boundary: false"):
        make_framer(tokenizer, chat_template_kwargs=silent).feedback("b", None)
    framer = make_framer(tokenizer, chat_template_kwargs=silent, strict=False)
    block = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(framer.prompt([{"role": "user", "content": "a"}])).endswith(block)
    frame = tokenizer.decode(framer.feedback("b", tokenizer.eos_token_id))
    assert frame == f"\n<|im_start|>user\nb<|im_end|>\n{block}"


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_equals_the_tokenizers_own(name):
    tokenizer, _ = TOKENIZERS[name]
    messages = [{"role": "user", "content": " Hello the\n"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(make_framer(tokenizer).prompt(messages)) == expected


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "gemma-3"])
def test_bos_stands_once(name):
    tokenizer, _ = TOKENIZERS[name]
    framer = make_framer(tokenizer)
    ids = (
        framer.prompt([{"role": "user", "content": "a"}])
        + framer.feedback("b", None)
        + framer.feedback("c", None)
    )
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "qwen3", "smollm2", "llama-3", "gemma-3"])
def test_the_system_prompt_stands_once(name):
    tokenizer, _ = TOKENIZERS[name]
    framer = make_framer(tokenizer)
    ids = framer.prompt([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}])
    text = tokenizer.decode(ids + framer.feedback("b", None))
    assert text.count("Be brief.") == 1
    assert text.count("system") == (name != "gemma-3")  # which puts it into the first user message


def test_an_observation_with_the_text_of_the_placeholder_is_kept():
    tokenizer, _ = TOKENIZERS["chatml"]
    text = tokenizer.decode(make_framer(tokenizer).feedback("@@assistant-reply-text@@", None))
    assert text == "<|im_end|>\n<|im_start|>user\n@@assistant-reply-text@@<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", ["<|im_end|>"]),
        ("llama-3", ["<|end_of_text|>", "<|eot_id|>"]),
        ("gemma-2", ["<end_of_turn>", "<eos>"]),
    ],
)
def test_end_tokens_include_the_terminator_of_the_template(name, expected):
    tokenizer, _ = TOKENIZERS[name]
    assert sorted(tokenizer.convert_ids_to_tokens(sorted(end_token_ids(tokenizer)))) == sorted(expected)


def test_end_tokens_come_from_the_generation_config_too():
    class GenerationConfig:
        eos_token_id = [5, 7]

    tokenizer, _ = TOKENIZERS["chatml"]
    assert end_token_ids(tokenizer, GenerationConfig()) == {5, 7, tokenizer.eos_token_id}
    assert end_token_ids(tiny_tokenizer(ONE_TURN)) == {tokenizer.eos_token_id}


def test_strict_refuses_a_prompt_that_the_rendered_turn_lacks():
    with pytest.raises(TemplateError, match="strict_chat_template_boundary: false"):
        make_framer(tiny_tokenizer(EMPTY_THINKING)).check_feedback()


def test_without_strict_the_frame_follows_the_reply():
    tokenizer = tiny_tokenizer(EMPTY_THINKING)
    framer = make_framer(tokenizer, strict=False)
    frame = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(framer.feedback("b", tokenizer.eos_token_id)) == frame
    assert tokenizer.decode(framer.feedback("b", None)) == "<|im_end|>" + frame


def test_a_space_before_the_reply_is_refused_or_left_out():
    tokenizer = mistral()
    with pytest.raises(TemplateError, match="differently"):
        make_framer(tokenizer).check_feedback()
    framer = make_framer(tokenizer, strict=False)
    assert tokenizer.decode(framer.feedback("b", tokenizer.eos_token_id)) == "[INST] b[/INST]"
    assert tokenizer.decode(framer.feedback("b", None)) == "</s>[INST] b[/INST]"


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("template", [LAST_MESSAGE_ONLY, ONE_TURN])
def test_a_template_without_a_second_turn_is_refused(template, strict):
    with pytest.raises(TemplateError, match=r"second turn|one message only"):
        make_framer(tiny_tokenizer(template), strict=strict).check_feedback()


def test_refusals_name_the_way_out():
    with pytest.raises(TemplateError, match=r"System role not supported.*drop env.system_prompt"):
        make_framer(gemma("gemma-2")).prompt(
            [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        )
    with pytest.raises(TemplateError, match="apply_chat_template: false"):
        make_framer(tiny_tokenizer(None))


def test_plain_text_has_one_bos_and_no_frame():
    tokenizer = mistral()
    framer = make_framer(tokenizer, apply_chat_template=False)
    ids = framer.prompt([{"role": "user", "content": "Q: 2+2?\nA:"}]) + framer.feedback("\nQ: 3?\nA:", None)
    assert tokenizer.decode(ids) == "<s>Q: 2+2?\nA:\nQ: 3?\nA:"


def test_template_arguments_reach_the_template():
    tokenizer = tiny_tokenizer("{{ style }}" + CHATML)
    framer = make_framer(tokenizer, chat_template_kwargs={"style": "terse"})
    assert tokenizer.decode(framer.prompt([{"role": "user", "content": "a"}])).startswith("terse<|im_start|>")


def test_equal_settings_share_a_framer():
    tokenizer, _ = TOKENIZERS["chatml"]
    assert make_framer(tokenizer) is make_framer(tokenizer, chat_template_kwargs={})
    assert make_framer(tokenizer) is not make_framer(tokenizer, strict=False)
