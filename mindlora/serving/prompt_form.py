"""PromptForm: what one user's text becomes before a model sees it, as the command line lets it be chosen."""

import dataclasses
from typing import Any, Dict, FrozenSet, List, Optional, Sequence

from mindlora.data.chat_template import read_template
from mindlora.data.templates import TEMPLATES, prompt_template
from mindlora.errors import RequestError
from mindlora.serving.chat_prompt import ChatPrompt, make_chat_prompt, read_messages


@dataclasses.dataclass(frozen=True)
class PromptForm:
    """How prompts are made.

    Attributes:
        prompt (ChatPrompt): Makes tokens of messages.
        title (str): What it is, in words for the user.
        takes_conversations (bool): Whether it takes a system message and earlier turns, or one message alone.
    """

    prompt: ChatPrompt
    title: str
    takes_conversations: bool

    def tokens(self, text: str, history: Sequence[Dict[str, str]] = (), system: Optional[str] = None) -> List[int]:
        """Returns the tokens of a user's text.

        Args:
            text (str): What the user says.
            history (sequence of dict): The messages before it. Default: none.
            system (str, optional): The system message. Default: None.

        Raises:
            RequestError: The form takes one message alone, and there are others, or the text cannot be used.
        """
        if system and not self.takes_conversations:
            raise RequestError(
                "A system message needs a chat template, and prompts are made without one: leave it out, or give one "
                "(--chat-template FILE)."
            )
        first = [{"role": "system", "content": system}] if system else []
        return self.prompt.tokens([*first, *history, {"role": "user", "content": text}])


class RawPrompt:
    """The text itself, with the special tokens that the tokenizer puts around one.

    Args:
        tokenizer: As load_tokenizer returns it.
    """

    ends: FrozenSet[int] = frozenset()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def tokens(self, messages: Sequence[Any]) -> List[int]:
        """Returns the tokens of the last message."""
        text = read_messages(messages)[-1]["content"]
        return list(self._tokenizer.encode(text, add_special_tokens=True, verbose=False))


def check_prompt_options(template: Optional[str] = None, chat_template: Optional[str] = None) -> None:
    """Raises what choose_prompt_form raises whatever the tokenizer is."""
    if chat_template is not None and template not in (None, "chat"):
        raise RequestError(f"--chat-template {chat_template} and --template {template}: give one of them.")
    if chat_template is not None:
        read_template(chat_template)
    if template not in (None, "chat", "none"):
        prompt_template(template.replace("\\n", "\n"))


def choose_prompt_form(
    tokenizer: Any, template: Optional[str] = None, chat_template: Optional[str] = None, chat: bool = False
) -> PromptForm:
    r"""Returns the form of prompts that a user asked for, or the one that the tokenizer suggests.

    Args:
        tokenizer: As load_tokenizer returns it.
        template (str, optional): "chat" for a chat template, "none" for the text itself, or the prompt of instruction
            data: "alpaca", "plain" or a text with {instruction}, in which \n is a new line. Default: None, the
            tokenizer's chat template if it has one, else the text itself.
        chat_template (str, optional): File with a chat template. Default: None, the tokenizer's own.
        chat (bool): Without a chat template, refuse, rather than take the text itself. Default: False.

    Raises:
        DataError: The file holds no chat template, or ``template`` is no prompt template.
        RequestError: Both are given, and ``template`` is not "chat".
        TokenizerError: There is no chat template, or it is not valid.
    """
    check_prompt_options(template, chat_template)
    if template == "none":
        return PromptForm(RawPrompt(tokenizer), "the text itself", False)
    if template not in (None, "chat"):
        prompt = make_chat_prompt(tokenizer, form=template.replace("\\n", "\n"))
        shown = template if template in TEMPLATES else '"' + template.replace("\n", "\\n") + '"'
        return PromptForm(prompt, f"in the form {shown}", False)
    if template is None and chat_template is None and not chat and not getattr(tokenizer, "chat_template", None):
        title = "the text itself, as the tokenizer has no chat template (--template gives another form)"
        return PromptForm(RawPrompt(tokenizer), title, False)
    prompt = make_chat_prompt(tokenizer, chat_template)
    return PromptForm(prompt, f"through {chat_template or 'the chat template of the tokenizer'}", True)
