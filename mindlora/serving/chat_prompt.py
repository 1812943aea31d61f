"""Prompts: converts messages, or a user's text, to the tokens before the answer."""

import dataclasses
import inspect
import json
import re
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Protocol, Sequence, Tuple

from mindlora.core.errors import RequestError, TokenizerError
from mindlora.core.text import shown
from mindlora.data import tokenizers
from mindlora.data.alpaca import TEMPLATES, prompt_template
from mindlora.data.chat_template import ChatTemplate, read_template
from mindlora.data.conversations import Conversation

# An argument of a call that locates the call in a template's text.
_MARK = "mark-of-a-call"
# OpenAI's newer name, unknown to templates.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatPrompt(Protocol):
    """Builds prompts from messages. ``ends`` are tokens that end the assistant's turn, in addition to end_tokens()."""

    ends: FrozenSet[int]

    def tokens(
        self,
        messages: Sequence[Any],
        tools: Optional[List[Dict[str, Any]]] = None,
        variables: Optional[Mapping[str, Any]] = None,
    ) -> List[int]:
        """Returns the tokens of a conversation and of the beginning of the assistant's turn.

        Args:
            messages (sequence of dict): Each {"role": system, developer, user, assistant or tool, "content": text, or
                a list of parts {"type": "text", "text"}}; a template may use more, such as "name". The assistant's may
                have "tool_calls" in OpenAI's form, and no content.
            tools (list of dict, optional): Tools in OpenAI's form that the assistant may call; only chat templates show
                them.
            variables (mapping, optional): Further variables of a chat template, such as enable_thinking, over those
                that the prompt was made with.

        Raises:
            RequestError: A message holds something else, or the conversation cannot be put into this form.
        """


def make_chat_prompt(
    tokenizer: Any,
    template_file: Optional[str] = None,
    form: Optional[str] = None,
    variables: Optional[Mapping[str, Any]] = None,
) -> ChatPrompt:
    """Returns the object that builds prompts from messages.

    Args:
        template_file (str, optional): File with a chat template. Default: None, the tokenizer's own.
        form (str, optional): Instead of a chat template, the prompt with which instruction data was converted: see
            mindlora.data.alpaca.prompt_template.
        variables (mapping, optional): Further variables of a chat template, such as enable_thinking.

    Raises:
        DataError: The file holds no chat template, or ``form`` is not a prompt template.
        RequestError: The template does not read one of the variables.
        TokenizerError: There is no chat template, or it is not valid.
    """
    if form is not None:
        return InstructionPrompt(tokenizer, form)
    try:
        return TemplatePrompt(tokenizer, read_template(template_file) if template_file else None, variables)
    except TokenizerError as error:
        raise TokenizerError(
            f"{error} For an adapter that was trained on instructions, give the prompt of its training instead "
            "(--template alpaca)."
        ) from error


class TemplatePrompt:
    """Messages formatted by a chat template, or by the tokenizer's own.

    As in training, no bos is added to the template's text.
    """

    def __init__(self, tokenizer: Any, template: Optional[str] = None, variables: Optional[Mapping[str, Any]] = None):
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, template)
        self._variables = dict(variables or {})
        self._own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"documents"} | {"messages"}
        self._check(self._variables)
        end = self._template.turn_end
        self.ends = frozenset() if end is None else frozenset(_encode(tokenizer, end)[-1:])
        for name in self._variables:
            if re.search(rf"\b{re.escape(name)}\b", self.template) is None:
                raise RequestError(
                    f"The chat template has no variable {name}, which chat_template_kwargs sets: leave it out, or use "
                    "another template."
                )

    @property
    def template(self) -> str:
        """The template's text, in the version for tools."""
        return str(self._tokenizer.get_chat_template(self._template.source, [{}]))

    def tokens(
        self,
        messages: Sequence[Any],
        tools: Optional[List[Dict[str, Any]]] = None,
        variables: Optional[Mapping[str, Any]] = None,
    ) -> List[int]:
        """See ChatPrompt."""
        conversation = self._template.with_thoughts(Conversation(read_messages(messages), tools))
        self._check(variables or {})
        return _encode(self._tokenizer, self._render(conversation, variables or {}))

    def behind_calls(
        self, results: Sequence[Mapping[str, Any]], tools: Optional[List[Dict[str, Any]]] = None
    ) -> Tuple[str, str]:
        """Returns the token that ends an assistant's turn, and the text from there to the beginning of its next turn.

        Args:
            results (sequence of dict): The messages in between, with the results of the tools that the first turn
                called.
            tools (list of dict, optional): As for ``tokens``.

        Raises:
            RequestError: The template refuses the messages, or writes no token behind a turn that calls tools.
        """
        calls = [{"type": "function", "function": {"name": results[0]["name"], "arguments": {"mark": _MARK}}}]
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        end = self._template.turn_end or ""
        text = self._render(Conversation([{"role": "user", "content": "x"}, turn, *map(dict, results)], tools), {})
        _, mark, behind = text.partition(_MARK)
        before, found, behind = behind.partition(end) if end else (behind, "", "")
        if not mark or not found:
            raise RequestError(
                "The chat template writes no token that ends a turn which calls tools, behind which their results "
                f"could stand: {shown(before)}. Use one that does."
            )
        return end, behind

    def _render(self, conversation: Conversation, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(conversation, True, {**self._variables, **variables})
        except Exception as error:  # a template is a program, which can fail in any way
            raise RequestError(
                f"The chat template refuses the messages: correct them. It says: {str(error)[:300]}"
            ) from error

    def _check(self, variables: Mapping[str, Any]) -> None:
        taken = sorted(self._own.intersection(variables))
        if taken:
            raise RequestError(
                f"chat_template_kwargs has {taken[0]}, which is not a variable of the template's own: leave it out."
            )


class InstructionPrompt:
    """One instruction in the form of instruction data: bos and prompt, tokenized as for training."""

    ends: FrozenSet[int] = frozenset()

    def __init__(self, tokenizer: Any, form: str):
        self._tokenizer = tokenizer
        self._form = prompt_template(form)
        bos = tokenizers.special_ids(tokenizer).bos
        self._bos = [] if bos is None else [bos]

    def tokens(
        self,
        messages: Sequence[Any],
        tools: Optional[List[Dict[str, Any]]] = None,
        variables: Optional[Mapping[str, Any]] = None,
    ) -> List[int]:
        """See ChatPrompt."""
        turns = read_messages(messages)
        roles = [message["role"] for message in turns]
        if roles != ["user"]:
            raise RequestError(
                f"The messages are from {', '.join(roles)}: the prompt of instruction data takes one message, the "
                "user's. Send the last one alone, or serve with a chat template (--chat-template FILE)."
            )
        text = self._form.prompt({"instruction": turns[0]["content"], "input": ""})
        return self._bos + _encode(self._tokenizer, text)


def read_messages(messages: Sequence[Any]) -> List[Dict[str, Any]]:
    """Returns messages for chat templates: their text as one string, without null fields.

    Raises RequestError if there are no messages, or one holds content that is not text.
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages is not a list with entries: send at least one message.")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message, where):
    if not isinstance(message, dict):
        raise RequestError(f"{where} must be an object with role and content.")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise RequestError(f"{where} has the role {role!r}, which is not supported: use {', '.join(_ROLES)}.")
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    refused = sorted(rest.keys() & {"function_call", "audio", "refusal"})
    if refused:
        raise RequestError(f"{where} has {refused[0]}, which is not supported: send text alone.")
    calls = rest.pop("tool_calls", None)
    content = message.get("content")
    if not calls:
        # A turn in which the assistant only thought, or said nothing, is sent back without content.
        text = "" if role == "assistant" and content is None else _text(content, where)
        return {**rest, "role": _ROLES[role], "content": text}
    if role != "assistant":
        raise RequestError(
            f"{where} has tool_calls and the role {role!r}: use assistant, whose turns alone have calls."
        )
    text = "" if content is None else _text(content, where)
    return {**rest, "role": role, "content": text, "tool_calls": _calls(calls, where)}


def _calls(calls, where):
    """Returns calls with their arguments as an object, for templates; OpenAI has JSON in a string."""
    read = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(
                f"{where}.tool_calls[{place}] must have a function with a name, and its arguments as JSON in a string: "
                "send the call as it came."
            ) from error
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read


def _text(content, where):
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise RequestError(f"{where} has no content: send a text.")
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where} has content of the type {kind!r}, which is not supported: send text alone.")
    return "".join(part["text"] for part in parts)


def _encode(tokenizer, text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The messages are not valid Unicode (half of a surrogate pair, {text[error.start]!r}): send whole "
            "characters."
        ) from error
    return tokenizers.encode(tokenizer, text)


@dataclasses.dataclass(frozen=True)
class PromptForm:
    """A way of building prompts.

    Attributes:
        title (str): A description for the user.
        takes_conversations (bool): Whether it takes a system message and earlier turns, rather than a single message.
    """

    prompt: ChatPrompt
    title: str
    takes_conversations: bool

    @property
    def is_text(self) -> bool:
        """Whether a prompt is the text itself, with nothing around it but special tokens."""
        return isinstance(self.prompt, RawPrompt)

    def tokens(self, text: str, history: Sequence[Dict[str, str]] = (), system: Optional[str] = None) -> List[int]:
        """Returns the tokens of a user's text after the messages of ``history`` and a system message.

        Raises RequestError if the text cannot be used, or the form takes one message alone and there are others.
        """
        if system and not self.takes_conversations:
            raise RequestError(
                "A system message needs a chat template, but prompts are made without one: leave it out, or give one "
                "(--chat-template FILE)."
            )
        first = [{"role": "system", "content": system}] if system else []
        return self.prompt.tokens([*first, *history, {"role": "user", "content": text}])


class RawPrompt:
    """The text itself, with the special tokens that the tokenizer adds to a text."""

    ends: FrozenSet[int] = frozenset()

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def tokens(
        self,
        messages: Sequence[Any],
        tools: Optional[List[Dict[str, Any]]] = None,
        variables: Optional[Mapping[str, Any]] = None,
    ) -> List[int]:
        """Returns the tokens of the last message; see ChatPrompt."""
        text = read_messages(messages)[-1]["content"]
        return list(self._tokenizer.encode(text, add_special_tokens=True, verbose=False))


def check_prompt_options(
    template: Optional[str] = None, chat_template: Optional[str] = None, variables: Optional[Mapping[str, Any]] = None
) -> None:
    """Raises the errors of choose_prompt_form that do not depend on the tokenizer."""
    if variables and template not in (None, "chat"):
        raise RequestError(
            f"--chat-template-kwargs is for a chat template, but --template {template} is none: give one of them."
        )
    if chat_template is not None and template not in (None, "chat"):
        raise RequestError(f"--chat-template {chat_template} and --template {template}: give one of them.")
    if chat_template is not None:
        read_template(chat_template)
    if template not in (None, "chat", "none"):
        prompt_template(template.replace("\\n", "\n"))


def choose_prompt_form(
    tokenizer: Any,
    template: Optional[str] = None,
    chat_template: Optional[str] = None,
    chat: bool = False,
    variables: Optional[Mapping[str, Any]] = None,
) -> PromptForm:
    r"""Returns the form of prompts that a user chose, or else the tokenizer's.

    Args:
        template (str, optional): "chat" for a chat template, "none" for the text itself, or the prompt of instruction
            data: "alpaca", "plain" or a text with {instruction}, in which \n is a new line. Default: None, the
            tokenizer's chat template if it has one, else the text itself.
        chat_template (str, optional): File with a chat template. Default: None, the tokenizer's own.
        chat (bool): Whether to raise without a chat template, rather than take the text itself.
        variables (mapping, optional): Further variables of a chat template, such as enable_thinking.

    Raises:
        DataError: The file holds no chat template, or ``template`` is not a prompt template.
        RequestError: Both are given, and ``template`` is not "chat"; or there are variables without a
            chat template.
        TokenizerError: There is no chat template, or it is not valid.
    """
    check_prompt_options(template, chat_template, variables)
    if template == "none":
        return PromptForm(RawPrompt(tokenizer), "the text itself", False)
    if template not in (None, "chat"):
        prompt = make_chat_prompt(tokenizer, form=template.replace("\\n", "\n"))
        shown = template if template in TEMPLATES else '"' + template.replace("\n", "\\n") + '"'
        return PromptForm(prompt, f"in the form {shown}", False)
    has_template = chat_template is not None or bool(getattr(tokenizer, "chat_template", None))
    if template is None and not chat and not has_template and not variables:
        title = "the text itself, as the tokenizer has no chat template (--template gives another form)"
        return PromptForm(RawPrompt(tokenizer), title, False)
    prompt = make_chat_prompt(tokenizer, chat_template, variables=variables)
    return PromptForm(prompt, f"through {chat_template or 'the chat template of the tokenizer'}", True)
