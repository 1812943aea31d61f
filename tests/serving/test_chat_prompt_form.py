"""choose_prompt_form: what a text becomes, as a user asks or as the tokenizer suggests."""

import pytest

from mindlora.core.errors import DataError, LoraError, RequestError, TokenizerError
from mindlora.serving.chat_prompt import choose_prompt_form
from tests.support.chat_templates import CHATML, chat_tokenizer

WITH, WITHOUT = chat_tokenizer(CHATML), chat_tokenizer(None)
TURN = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "tokenizer, words, text, title",
    [
        (WITH, {}, TURN, "through the chat template of the tokenizer"),
        (WITH, {"template": "chat", "chat": True}, TURN, "through the chat template of the tokenizer"),
        (WITHOUT, {"chat_template": "t.jinja"}, "<s>you: hi\n", "through t.jinja"),
        (WITH, {"template": "chat", "chat_template": "t.jinja"}, "<s>you: hi\n", "through t.jinja"),
        (WITH, {"template": "none"}, "<s>hi", "the text itself"),
        (
            WITHOUT,
            {},
            "<s>hi",
            "the text itself, as the tokenizer has no chat template (--template gives another form)",
        ),
        (WITHOUT, {"template": "none", "chat": True}, "<s>hi", "the text itself"),
        (WITH, {"template": "plain"}, "<s>hi\n", "in the form plain"),
        (WITH, {"template": r"Q: {instruction}\nA:"}, "<s>Q: hi\nA:", r'in the form "Q: {instruction}\nA:"'),
        (WITH, {"template": "Q: {instruction}\n"}, "<s>Q: hi\n", r'in the form "Q: {instruction}\n"'),
    ],
)
def test_forms(tokenizer, words, text, title, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ bos_token }}{% for m in messages %}you: {{ m.content + '\\n' }}{% endfor %}")
    form = choose_prompt_form(tokenizer, **words)
    assert (tokenizer.decode(form.tokens("hi")), form.title) == (text, title)


def test_a_conversation_goes_through_a_chat_template_alone():
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = WITH.decode(choose_prompt_form(WITH).tokens("hi", history, "s"))
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n" + TURN
    )
    for template in ("none", "alpaca"):
        form = choose_prompt_form(WITH, template)
        assert not form.takes_conversations
        with pytest.raises(RequestError, match="^A system message needs a chat template"):
            form.tokens("hi", system="s")


@pytest.mark.parametrize(
    "tokenizer, words, error, message",
    [
        (WITHOUT, {"chat": True}, TokenizerError, "The tokenizer has no chat template: give one"),
        (WITHOUT, {"template": "chat"}, TokenizerError, "The tokenizer has no chat template: give one"),
        (WITH, {"template": "plain", "chat_template": "x"}, RequestError, "--chat-template x and --template plain:"),
        (WITH, {"template": "alpacca"}, DataError, "template 'alpacca' is neither"),
        (WITH, {"template": "{text}"}, DataError, "template '{text}' has {text}"),
        (WITH, {"chat_template": "missing"}, DataError, "There is no file missing"),
        (chat_tokenizer("{% for %}"), {}, TokenizerError, "The chat template is not valid at line 1"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(tokenizer, words, error, message):
    with pytest.raises(LoraError) as caught:
        choose_prompt_form(tokenizer, **words)
    assert type(caught.value) is error and str(caught.value).startswith(message)
