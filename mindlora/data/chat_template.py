"""Chat templates, which turn a conversation into the text that a model sees and mark the assistant's parts in it.

A template is a Jinja program that comes with the tokenizer. Some templates mark what the assistant says, by ``{%
generation %}``. For all others, the turns are found by rendering the beginnings of the conversation. An assistant's
turn begins where the text of the messages before it ends, with the prompt that lets the assistant speak
(add_generation_prompt), and ends where the text of the messages up to it ends. Both texts must be prefixes of the
complete text.
"""

import functools
import json
import re
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from mindlora.core.errors import DataError, TokenizerError
from mindlora.data.conversations import Conversation
from mindlora.data.conversion import Encoded, UnusableRow
from mindlora.data.sources import read_text
from mindlora.files.base.tokenizer_files import token_behind_answer
from mindlora.models.thoughts import FAMILIES

# The beginning and end of a span of characters.
Span = Tuple[int, int]
_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def read_template(path: str) -> str:
    """Returns the chat template in a file; raises DataError if there is none."""
    text = read_text(path)
    if "messages" not in text or "{" not in text:
        raise DataError(f"{path} is not a chat template: it must be a Jinja template that goes through messages.")
    return text


class ChatTemplate:
    """A chat template, ``source`` or the tokenizer's own, applied by a tokenizer.

    Raises TokenizerError if there is none, it is not valid, or the tokenizer is not Hugging Face's.
    """

    def __init__(self, tokenizer: Any, source: Optional[str] = None):
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerError(
                "Chat data needs a tokenizer.json of Hugging Face, but this tokenizer is of another kind: save it with "
                "transformers' LlamaTokenizerFast.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)."
            )
        if source is None and not tokenizer.chat_template:
            raise TokenizerError(
                "The tokenizer has no chat template: give one with --chat-template FILE, such as chat_template.jinja "
                "of a model with the same tokens."
            )
        self.tokenizer = tokenizer
        self.source = source
        added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self.special = tuple({*added, *map(str, tokenizer.all_special_tokens)})
        self._check()

    def _check(self):
        from jinja2 import TemplateSyntaxError

        try:
            self.tokenizer.get_chat_template(self.source)
        except ValueError as error:  # There are several templates, and none is the default.
            raise TokenizerError(
                "The tokenizer has no chat template that can be used: give one with --chat-template FILE. "
                f"transformers says: {error}"
            ) from error
        try:
            self.render(Conversation([{"role": "user", "content": "x"}], None))
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"The chat template is not valid at line {error.lineno}: {error.message}. Correct that line."
            ) from error
        except Exception:  # The template may reject this conversation; each row will report it.
            return

    def render(
        self, conversation: Conversation, prompt: bool = False, variables: Optional[Mapping[str, Any]] = None
    ) -> str:
        """Returns the text of a conversation, followed by the beginning of an assistant's turn if ``prompt`` is True.

        ``variables`` are the template's other variables, such as enable_thinking.
        """
        # A batch of one, because a single conversation must not be empty.
        return self.tokenizer.apply_chat_template(
            [conversation.messages],
            tools=conversation.tools,
            chat_template=self.source,
            tokenize=False,
            add_generation_prompt=prompt,
            **(variables or {}),
        )[0]

    def with_thoughts(self, conversation: Conversation) -> Conversation:
        """Returns the conversation with the assistant's thoughts where the template reads them."""
        if self._thoughts is None:
            return conversation
        return conversation._replace(messages=with_thoughts_in(self._thoughts, conversation.messages))

    def spans(self, conversation: Conversation, first: int = 0) -> Tuple[str, List[Span]]:
        """Returns the text of a conversation and where the assistant speaks in it, the end of each turn included.

        Only messages from the number ``first`` on are examined. Raises UnusableRow if the template rejects the
        conversation, does not show where the assistant speaks, or writes the assistant's thoughts in two blocks.
        """
        try:
            template = self.tokenizer.get_chat_template(self.source, conversation.tools)
            text, spans = (self._marked if _MARK.search(template) else self._turns)(conversation, template, first)
        except UnusableRow:
            raise
        except Exception as error:  # A template is a program and may raise any exception.
            raise UnusableRow(f"the chat template refuses it ({str(error)[:100]})") from error
        if self._writes_block:
            check_thoughts(conversation.messages, text)
        spans = [(begin, end) for begin, end in spans if text[begin:end].strip()]
        if not spans:
            raise UnusableRow("the chat template shows nothing that the assistant says")
        return text, spans

    def _marked(self, conversation, template, first):
        from transformers.utils.chat_template_utils import render_jinja_template

        if any(message.get("weight") == 0 for message in conversation.messages):
            raise UnusableRow('a "weight" of 0, which a chat template with generation marks cannot take')
        texts, marks = render_jinja_template(
            conversations=[conversation.messages],
            tools=conversation.tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        text = texts[0]
        ends = [token for token in (self.turn_end, self.tokenizer.eos_token) if token]
        spans = []
        for begin, end in marks[0]:
            length = self._turn_length(text[begin:end])
            # Some templates end the mark before the token that ends the turn, but a model must learn to stop.
            behind = "" if self.is_ended(text[begin : begin + length]) else text[end:]
            ending = next(filter(behind.startswith, ends), "")
            spans.append((begin, begin + length + len(ending)))
        before = sum(message["role"] == "assistant" for message in conversation.messages[:first])
        return text, spans[before:]

    def _turns(self, conversation, _, first):
        messages, tools = conversation
        text = self.render(conversation)
        spans = []
        closing = self._closing(conversation, text)
        for number, message in enumerate(messages):
            if number < first or message["role"] != "assistant" or message.get("weight") == 0:
                continue
            before = self.render(Conversation(messages[:number], tools), prompt=True)
            until = self.render(Conversation(messages[: number + 1], tools)).removesuffix(closing)
            if not text.startswith(until):
                raise UnusableRow("the chat template renders earlier turns differently once the conversation goes on")
            if not until.startswith(before):
                raise UnusableRow("the chat template's prompt for the assistant is not how the assistant's turn begins")
            spans.append((len(before), len(before) + self._turn_length(until[len(before) :])))
        return text, spans

    def _closing(self, conversation, text):
        """Returns the eos that some templates write behind a conversation, unless the assistant is to speak next."""
        eos = self.tokenizer.eos_token
        if not eos or not text.endswith(eos):
            return ""
        prompted = self.render(conversation, prompt=True)
        return eos if prompted.startswith(text[: -len(eos)]) and not prompted.startswith(text) else ""

    def _turn_length(self, turn):
        """Returns the length of a turn without the white space behind its last special token."""
        stripped = turn.rstrip()
        return len(stripped) if stripped.endswith(self.special) else len(turn)

    @functools.cached_property
    def turn_end(self) -> Optional[str]:
        """The special token with which the template ends the assistant's turns, if there is one."""
        return token_behind_answer(self._render_messages, self.special)

    @functools.cached_property
    def _thoughts(self) -> Optional[str]:
        return thoughts_field(self._render_messages)

    @functools.cached_property
    def _writes_block(self) -> bool:
        return writes_thoughts(self._render_messages)

    def _render_messages(self, messages: List[Dict[str, Any]]) -> str:
        return self.render(Conversation(messages, None))

    def is_ended(self, turn: str) -> bool:
        """Returns whether a turn ends in a special token, at which generation can stop."""
        return turn.endswith(self.special)


def left_out(conversation: Conversation, text: str) -> List[str]:
    """Returns the parts of a conversation that its text does not show completely.

    Raises UnusableRow for a missing tool call, since the model would learn something else in its place.
    """

    def shown(content):
        # Some templates write tools' answers as JSON.
        return content.strip() in text or json.dumps(content.strip(), ensure_ascii=False)[1:-1] in text

    messages, tools = conversation
    missing = set()
    for message in messages:
        calls = message.get("tool_calls", [])
        if not all(shown(call["function"]["name"]) for call in calls):
            raise UnusableRow("the chat template does not show a call of a tool")
        if not shown(message["content"] or ""):
            missing.add(f"{message['role']} messages")
        if not shown(thoughts_of(message) or ""):
            missing.add(f"{message['role']}'s thoughts")
    if not all(shown(str(tool["function"]["name"])) for tool in tools or []):
        missing.add("tools")
    return sorted(missing)


def encode_spans(tokenizer: Any, text: str, spans: Sequence[Span]) -> Encoded:
    """Returns the tokens of a text, special tokens included; those inside the spans of characters are learned.

    The text is tokenized as a whole, as at inference, and no special token is added. If a token then reaches across the
    end of a span, such as a new line of the prompt joined with one that the answer begins with, the text is tokenized
    in two parts there. Raises UnusableRow if the tokenizer cannot do that.
    """
    tokens, starts, ends = _tokens_of(tokenizer, text)
    edges = sorted({edge for span in spans for edge in span})
    cuts = [edge for edge in edges if ((starts < edge) & (edge < ends)).any()]
    if cuts:
        whole = tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False)
        parts = []
        starts_of_parts = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)]):
            part, part_starts, _ = _tokens_of(tokenizer, text[begin:end])
            parts.append(part)
            starts_of_parts.append(part_starts + begin)
        tokens = np.concatenate(parts)
        starts = np.concatenate(starts_of_parts)
        # Tokenizers of the sentencepiece kind put a space before each part.
        if tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False) != whole:
            raise UnusableRow("a token that holds the end of one turn and the beginning of the next")
    learned = np.zeros(len(tokens), bool)
    for begin, end in spans:
        learned |= (starts >= begin) & (starts < end)
    return Encoded(tokens, learned)


def _tokens_of(tokenizer: Any, text: str) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the ids of a text, int32 [n], and where their characters begin and end, int64 [n] each."""
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(coded["offset_mapping"], np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(offsets[:, 1])
    # Some tokenizers leave the space before a word out of its range, although it belongs to the word's token.
    starts = np.minimum(offsets[:, 0], np.concatenate([[0], ends[:-1]]))
    return np.array(coded["input_ids"], np.int32), starts, ends


def ends_of_learned(learned: np.ndarray) -> List[int]:
    """Returns the number of tokens up to the end of each run of learned tokens."""
    following = np.append(learned[1:], False)
    return (np.flatnonzero(learned & ~following) + 1).tolist()


# The assistant's thoughts: in a field of its message or in its content, wherever the template reads them
#
# Templates that open the block of thoughts themselves read the thoughts from a field. In the content, thoughts would
# follow an empty block; a server that does not separate them even omits the tag that begins them.


# Names of the field, in servers and in templates.
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking", "thoughts")
_THOUGHT, _ANSWER = "A thought.", "An answer."
# The tags in the contents of training data.
_BEGIN, _END = FAMILIES[0].begin, FAMILIES[0].end
Messages = List[Dict[str, Any]]


def thoughts_field(render: Callable[[Messages], str]) -> Optional[str]:
    """Returns the field from which a chat template reads thoughts, or None; ``render`` returns the text of messages."""
    for field in _THOUGHT_FIELDS:
        if _THOUGHT in _rendered_with(render, {field: _THOUGHT}):
            return field
    return None


def writes_thoughts(render: Callable[[Messages], str]) -> bool:
    """Returns whether a chat template writes a block of thoughts for a message without thoughts."""
    return _END in _rendered_with(render, {})


def _rendered_with(render, fields):
    answer = {"role": "assistant", "content": _ANSWER, **fields}
    try:
        return render([{"role": "user", "content": "A question."}, answer])
    except Exception:  # A template is a program and may reject this conversation.
        return ""


def thoughts_of(message: Dict[str, Any]) -> Optional[str]:
    """Returns the thoughts in a field of a message, or None."""
    values = (message.get(field) for field in _THOUGHT_FIELDS)
    return next((value for value in values if isinstance(value, str) and value.strip()), None)


def with_thoughts_in(field: str, messages: Sequence[Dict[str, Any]]) -> Messages:
    """Returns the messages with the assistant's thoughts moved into this field."""
    return [_with_thoughts(message, field) if message["role"] == "assistant" else message for message in messages]


def _with_thoughts(message, field):
    thoughts, content = thoughts_of(message), message["content"]
    if thoughts is None:
        thoughts, content = _apart(content or "")
    if thoughts is None:
        return message
    others = {name: value for name, value in message.items() if name not in _THOUGHT_FIELDS}
    return {**others, "content": content, field: thoughts}


def _apart(content):
    """Splits a content into the thoughts at its beginning, even without an opening tag, and the rest."""
    before, end, answer = content.partition(_END)
    _, begin, thoughts = before.partition(_BEGIN)
    if not end or before[: before.find(_BEGIN)].strip() and begin:
        return None, content
    thoughts = (thoughts if begin else before).strip("\n")
    return (thoughts, answer.lstrip("\n")) if thoughts.strip() else (None, content)


def check_thoughts(messages: Sequence[Dict[str, Any]], text: str) -> None:
    """Raises UnusableRow if the text of messages has a second block of thoughts, or half a block, after the template's.

    The template must be one that writes a block in each turn of the assistant (see ``writes_thoughts``).
    """
    turns = [message for message in messages if message["role"] == "assistant"]
    others = [message["content"] or "" for message in messages if message["role"] != "assistant"]
    most = len(turns) + sum(content.count(_END) for content in others)
    if any(_END in (message["content"] or "") for message in turns) and text.count(_END) > most:
        raise UnusableRow(
            f'"{_END}" in the assistant\'s content, behind the block that the chat template writes itself'
        )
