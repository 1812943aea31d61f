"""Where the assistant speaks: what is learned are its texts and the ends of its turns, and nothing else."""

import numpy as np
import pytest

from mindlora.core.errors import DataError, TokenizerError
from mindlora.data.chat import ChatExamples
from mindlora.data.chat_template import read_template
from mindlora.data.conversations import read_conversation
from mindlora.data.conversion import UnusableRow
from tests.support.chat_templates import (
    CHATML,
    DIALOGUE,
    LLAMA3,
    MARKED,
    MISTRAL,
    PHI,
    THINKING,
    chat_tokenizer,
    runs,
    word_tokenizer,
)

WORDS = "[INST] How many cats are there? [/INST] There are 2 cats. And dogs? None."


def encode(tokenizer, messages, **record):
    """Returns the tokens of a conversation, and the notes on it; without that on the tokenizer's own eos."""
    examples = ChatExamples()
    examples.prepare(tokenizer)
    encoded = examples.encode(examples.parse({"messages": messages, **record}), tokenizer)
    return encoded, [note for note in examples.notes() if note != examples.unstated_end]


@pytest.mark.parametrize(
    "template, start, end, make",
    [
        (CHATML, "", "<|im_end|>", chat_tokenizer),
        (PHI, "", "<|im_end|>", chat_tokenizer),
        (LLAMA3, "", "<|eot_id|>", chat_tokenizer),
        (MISTRAL, " ", "</s>", chat_tokenizer),
        (MISTRAL, "", "</s>", lambda template: word_tokenizer(template, WORDS)),
        (MARKED, "", "<|im_end|>", lambda template: chat_tokenizer(template, eos_token="<|im_end|>")),
    ],
)
def test_the_assistants_turns_are_learned(template, start, end, make):
    tokenizer = make(template)
    encoded, notes = encode(tokenizer, DIALOGUE)
    assert runs(encoded, tokenizer) == [start + DIALOGUE[1]["content"] + end, start + DIALOGUE[3]["content"] + end]
    # All of it is what transformers itself makes of the conversation, so bos is there once or not at all.
    assert encoded.tokens.tolist() == tokenizer.apply_chat_template(DIALOGUE, return_dict=False)
    assert tokenizer.bos_token_id not in encoded.tokens[1:] and notes == []
    assert encoded.tokens.dtype == np.int32 and encoded.learned.dtype == bool


def test_marks_are_taken_as_transformers_takes_them():
    marked = MARKED.replace(
        "{% endgeneration %}{% else %}", "{{ '<|im_end|>' }}{% endgeneration %}{% else %}<|im_end|>"
    )
    marked = marked.replace("{{ '<|im_end|>\\n' }}", "{{ '\\n' }}")
    tokenizer = chat_tokenizer(marked)
    thoughts = [{**message, "content": f"<think>x</think>{message['content']}"} for message in DIALOGUE]
    encoded, notes = encode(tokenizer, thoughts)
    expected = tokenizer.apply_chat_template(thoughts, return_dict=True, return_assistant_tokens_mask=True)
    assert encoded.tokens.tolist() == expected["input_ids"]
    assert encoded.learned.tolist() == [bool(mark) for mark in expected["assistant_masks"]]
    last = "<think>x</think>None.<|im_end|>"
    assert runs(encoded, tokenizer) == ["There are 2 cats, 温太医.<|im_end|>", last]
    assert notes == ["the chat template does not show all of the assistant messages of 1 rows"]


@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_a_turn_of_a_marked_template_ends_with_its_token_wherever_the_mark_ends(eos):
    inside = MARKED.replace("{% endgeneration %}", "{{ '<|im_end|>\\n' }}{% endgeneration %}")
    inside = inside.replace(
        "{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}", "{{ message.content }}<|im_end|>{% endif %}"
    )
    for template in (MARKED, inside):
        tokenizer = chat_tokenizer(template, eos_token=eos)
        encoded, notes = encode(tokenizer, DIALOGUE)
        assert runs(encoded, tokenizer) == ["There are 2 cats, 温太医.<|im_end|>", "None.<|im_end|>"]
        assert not any("without a special token" in note for note in notes)


def test_text_that_a_token_would_join_with_the_prompt():
    tokenizer = chat_tokenizer(CHATML)
    answer = "\n\n there are cats \n\n"
    messages = [DIALOGUE[0], {"role": "assistant", "content": answer}, DIALOGUE[2], DIALOGUE[3]]
    encoded, _ = encode(tokenizer, messages)
    assert runs(encoded, tokenizer) == [answer + "<|im_end|>", "None.<|im_end|>"]
    # The prompt has the tokens that it has at inference.
    first = int(encoded.learned.argmax())
    prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    assert encoded.tokens[:first].tolist() == prompt
    assert encoded.tokens.tolist() != tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(encoded.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    # A tokenizer of the sentencepiece kind cannot do that.
    spaced = word_tokenizer(MISTRAL.replace("{{- ' ' + ", "{{- ").replace("[/INST]'", "[/INST] '"), WORDS)
    with pytest.raises(UnusableRow, match="a token that holds the end of one turn"):
        encode(spaced, DIALOGUE)


def test_tools_and_turns_without_end():
    tokenizer = chat_tokenizer(LLAMA3)
    tools = [{"name": "count", "parameters": {}}]
    messages = [
        {"from": "human", "value": "How many?"},
        {"from": "function_call", "value": '{"name": "count", "arguments": {"of": "cats"}}'},
        {"from": "observation", "value": 'There are "2".'},
        {"from": "gpt", "value": "2 cats."},
    ]
    encoded, notes = encode(tokenizer, messages, tools=tools)
    assert runs(encoded, tokenizer) == [
        '{"name": "count", "parameters": {"of": "cats"}}<|eot_id|>',
        "2 cats.<|eot_id|>",
    ]
    assert notes == []
    plain = "{% for message in messages if message.role != 'tool' %}{{ message.role + ': ' }}{{ message.content }}\n"
    plain += "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    with pytest.raises(UnusableRow, match="does not show a call of a tool"):
        encode(chat_tokenizer(plain), messages, tools=tools)
    tokenizer = chat_tokenizer(plain)
    encoded, notes = encode(tokenizer, messages[:1] + messages[2:], tools=tools)
    assert runs(encoded, tokenizer) == ["2 cats.\n"]
    assert notes[:2] == [
        f"the chat template does not show all of the {what} of 1 rows" for what in ("tool messages", "tools")
    ]
    assert "in 1 rows, a turn of the assistant ends without a special token" in notes[2]


def test_a_weight_of_0_is_not_learned():
    silent = [{**DIALOGUE[1], "weight": 0} if number == 1 else message for number, message in enumerate(DIALOGUE)]
    tokenizer = chat_tokenizer(CHATML)
    encoded, _ = encode(tokenizer, silent)
    assert runs(encoded, tokenizer) == ["None.<|im_end|>"]
    with pytest.raises(UnusableRow, match='a "weight" of 0, which a chat template with generation marks'):
        encode(chat_tokenizer(MARKED), silent)


@pytest.mark.parametrize(
    "template, messages, reason",
    [
        (
            THINKING,
            [{"role": "assistant", "content": "<think>x</think>y"}, *DIALOGUE],
            "renders earlier turns differently",
        ),
        (CHATML.replace("assistant\\n", "assistant\\n<think>"), DIALOGUE, "is not how the assistant's turn begins"),
        (MISTRAL, DIALOGUE[1:], r"the chat template refuses it \(Alternate\)"),
        (CHATML.replace("message.content", "message.missing.part"), DIALOGUE, "the chat template refuses it .*missing"),
        (MARKED.replace("== 'assistant'", "== 'bot'"), DIALOGUE, "shows nothing that the assistant says"),
    ],
)
def test_conversations_that_a_template_cannot_take(template, messages, reason):
    with pytest.raises(UnusableRow, match=reason):
        encode(chat_tokenizer(template), messages)


def test_the_last_turn_may_think():
    tokenizer = chat_tokenizer(THINKING)
    encoded, _ = encode(tokenizer, [*DIALOGUE[:3], {"role": "assistant", "content": "<think>x</think>y"}])
    assert runs(encoded, tokenizer)[-1] == "<think>x</think>y<|im_end|>"
    # A conversation may begin with the assistant, and end with the user, who is not learned.
    encoded, _ = encode(tokenizer, DIALOGUE[1:3])
    assert runs(encoded, tokenizer) == [DIALOGUE[1]["content"] + "<|im_end|>"]


@pytest.mark.parametrize(
    "template, message",
    [
        (None, r"no chat template: give one with --chat-template FILE"),
        ({"rag": CHATML}, "give one with --chat-template FILE.* says: This model has multiple chat templates"),
        ("{% for message in messages %}\n{% endif %}", "not valid at line 2"),
        ("{{ messages | unknown }}", "not valid at line 1"),
    ],
)
def test_tokenizers_without_a_template(template, message):
    with pytest.raises(TokenizerError, match=message):
        ChatExamples().prepare(chat_tokenizer(template))


def test_a_tokenizer_of_another_kind_and_a_file_that_is_no_template(tmp_path):
    with pytest.raises(TokenizerError, match=r"needs a tokenizer\.json of Hugging Face"):
        ChatExamples(CHATML).prepare(object())
    (tmp_path / "x.jinja").write_text("Hello")
    with pytest.raises(DataError, match=r"x\.jinja is not a chat template"):
        read_template(str(tmp_path / "x.jinja"))
    with pytest.raises(DataError, match="There is no file"):
        read_template(str(tmp_path / "y.jinja"))


def test_several_templates_of_which_one_is_for_tools():
    tokenizer = chat_tokenizer({"default": CHATML, "tool_use": LLAMA3})
    assert "<|im_end|>" in tokenizer.decode(encode(tokenizer, DIALOGUE)[0].tokens)
    assert "<|eot_id|>" in tokenizer.decode(encode(tokenizer, DIALOGUE, tools=[{"name": "f"}])[0].tokens)
    assert read_conversation({"messages": DIALOGUE}).tools is None
