"""Messages to tokens: by a chat template, or in the form of instruction data."""

import pytest

from mindlora.core.errors import DataError, RequestError, TokenizerError
from mindlora.data import tokenizers
from mindlora.data.chat import ChatExamples
from mindlora.serving.chat_prompt import choose_prompt_form, make_chat_prompt
from tests.support.chat_templates import (
    CHATML,
    DIALOGUE,
    LLAMA3,
    MARKED,
    MISTRAL,
    PHI,
    THINKING,
    chat_tokenizer,
    word_tokenizer,
)
from tests.support.instruction_rows import encode_row

WORDS = "[INST] How many cats are there? [/INST] There are 2 cats. And dogs? None."
USER = {"role": "user", "content": "How many cats?"}


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, PHI, THINKING])
def test_a_prompt_is_what_transformers_makes_and_begins_what_training_saw(template):
    tokenizer = chat_tokenizer(template)
    tokens = make_chat_prompt(tokenizer).tokens(DIALOGUE[:3])
    assert tokens == tokenizer.apply_chat_template(DIALOGUE[:3], add_generation_prompt=True, return_dict=False)
    assert tokens.count(tokenizer.bos_token_id) == ("bos_token" in template)
    examples = ChatExamples()
    examples.prepare(tokenizer)
    # Left out: new lines that this tokenizer splits once text follows them, and thoughts.
    if template not in (LLAMA3, THINKING):
        trained = examples.encode(examples.parse({"messages": DIALOGUE}), tokenizer)
        assert trained.tokens[: len(tokens)].tolist() == tokens and trained.learned[len(tokens)]


def test_the_template_may_come_from_a_file(tmp_path):
    (tmp_path / "chat.jinja").write_text(CHATML, encoding="utf-8")
    tokens = make_chat_prompt(chat_tokenizer(None), str(tmp_path / "chat.jinja")).tokens([USER])
    assert tokens == make_chat_prompt(chat_tokenizer(CHATML)).tokens([USER])
    (tmp_path / "chat.jinja").write_text("nothing", encoding="utf-8")
    with pytest.raises(DataError, match="is not a chat template"):
        make_chat_prompt(chat_tokenizer(None), str(tmp_path / "chat.jinja"))


def test_without_a_template_the_error_says_what_to_give():
    with pytest.raises(TokenizerError, match=r"no chat template: give one with --chat-template.*--template alpaca"):
        make_chat_prompt(chat_tokenizer(None))


@pytest.mark.parametrize(
    "template, end",
    [*((template, "<|im_end|>") for template in (CHATML, PHI, MARKED)), (LLAMA3, "<|eot_id|>"), (MISTRAL, "</s>")],
)
def test_the_token_that_ends_a_turn_ends_answers(template, end):
    tokenizer = chat_tokenizer(template)
    assert make_chat_prompt(tokenizer).ends == {tokenizer.convert_tokens_to_ids(end)}


def test_a_template_that_does_not_show_where_a_turn_ends_names_no_token():
    plain = "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
    for template in (plain, "{{ messages[0].content }}", "{{ raise_exception('never') }}"):
        assert make_chat_prompt(word_tokenizer(template, WORDS)).ends == frozenset()


def test_variables_reach_the_template_and_others_are_refused():
    template = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    tokenizer = chat_tokenizer(template)
    plain = make_chat_prompt(tokenizer)
    off = choose_prompt_form(tokenizer, variables={"enable_thinking": False}).prompt
    assert tokenizer.decode(off.tokens([USER])) == tokenizer.decode(plain.tokens([USER])) + "<think></think>"
    assert plain.tokens([USER], variables={"enable_thinking": False, "unknown": 1}) == off.tokens([USER])
    assert off.tokens([USER], variables={"enable_thinking": True}) == plain.tokens([USER])
    with pytest.raises(RequestError, match="no variable enable_thinkin, which chat_template_kwargs sets"):
        make_chat_prompt(tokenizer, variables={"enable_thinkin": False})
    for given in ({"tokenize": True}, {"add_generation_prompt": False}):
        with pytest.raises(RequestError, match=f"chat_template_kwargs has {next(iter(given))}"):
            make_chat_prompt(tokenizer, variables=given)
        with pytest.raises(RequestError, match=f"chat_template_kwargs has {next(iter(given))}"):
            plain.tokens([USER], variables=given)
    with pytest.raises(TokenizerError, match="no chat template"):
        choose_prompt_form(chat_tokenizer(None), variables={"enable_thinking": False})


def test_the_form_of_instruction_data_is_that_of_training(tokenizer):
    prompt = make_chat_prompt(tokenizer, form="alpaca")
    tokens = prompt.tokens([USER])
    trained = encode_row({"instruction": USER["content"], "input": "", "output": "x"}, tokenizer)
    assert tokens == trained.tokens[~trained.learned].tolist() and prompt.ends == frozenset()
    assert make_chat_prompt(tokenizer, form="Q: {instruction}\nA:").tokens([USER]) == [
        tokenizer.bos_token_id,
        *tokenizers.encode(tokenizer, "Q: How many cats?\nA:"),
    ]
    with pytest.raises(DataError, match="neither alpaca nor plain"):
        make_chat_prompt(tokenizer, form="alpacca")


@pytest.mark.parametrize("messages", [DIALOGUE[:3], [{"role": "system", "content": "x"}, USER], DIALOGUE[1:2]])
def test_instruction_data_has_one_message(tokenizer, messages):
    with pytest.raises(RequestError, match="The messages are from .*takes one message, the user's"):
        make_chat_prompt(tokenizer, form="plain").tokens(messages)


def test_parts_of_text_are_joined_and_other_fields_reach_the_template():
    template = "{% for message in messages %}{{ message.name }}/{{ message.role }}:{{ message.content }};{% endfor %}"
    tokenizer = chat_tokenizer(template)
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "many"}]
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": None, "refusal": None},
    ]
    text = tokenizer.decode(make_chat_prompt(tokenizer).tokens(messages))
    assert text == "/system:Be brief.;Ann/user:How many;/assistant:;"


@pytest.mark.parametrize(
    "messages, problem",
    [
        ([], "messages is not a list with entries"),
        ("Hello", "messages is not a list with entries"),
        (None, "messages is not a list with entries"),
        (["Hello"], r"messages\[0\] must be an object"),
        ([USER, {"content": "x"}], r"messages\[1\] has the role None, which is not supported: use system, developer"),
        ([{"role": "clerk", "content": "x"}], "has the role 'clerk', which"),
        ([{"role": ["user"], "content": "x"}], r"has the role \['user'\], which"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 5}], "has no content"),
        ([{"role": "user", "content": ["x"]}], "content of the type None"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "content of the type 'text'"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "content of the type 'image_url'"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "must have a function with a name"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "use assistant, whose turns alone have calls"),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "has function_call, which is not supported"),
        ([{"role": "user", "content": "a\ud800b"}], r"not valid Unicode \(half of a surrogate pair, '\\ud800'\)"),
    ],
)
def test_what_is_not_text_is_refused_by_name(messages, problem):
    with pytest.raises(RequestError, match=problem):
        make_chat_prompt(chat_tokenizer(CHATML)).tokens(messages)


def test_what_a_template_refuses_is_the_requests_error():
    prompt = make_chat_prompt(chat_tokenizer(MISTRAL))
    with pytest.raises(RequestError, match="The chat template refuses the messages: .* It says: Alternate"):
        prompt.tokens([USER, USER])
