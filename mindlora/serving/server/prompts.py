"""Prompts: converts texts and conversations to the model's tokens, within the limits."""

from typing import Any, FrozenSet, List, Mapping, Optional, Sequence, Tuple, Union

from mindlora.core.errors import TokenizerError
from mindlora.data import tokenizers
from mindlora.models.thoughts import marks_of
from mindlora.serving.chat_prompt import ChatPrompt, make_chat_prompt
from mindlora.serving.detokenizer import TextDecoder
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.schemas import Message, Tool
from mindlora.serving.server.settings import ServerSettings
from mindlora.serving.thoughts import Thoughts, thoughts_after
from mindlora.serving.tools import ToolFormat, format_of


class Prompts:
    """Tokenizes the contents of requests. It is slow for long texts, so it is called in a thread.

    Raises LoraError if the chat template of the settings cannot be used.
    """

    def __init__(self, engine: Any, decoder: TextDecoder, settings: ServerSettings):
        self._tokenizer = engine.tokenizer
        self._seq_length = engine.seq_length
        self._decoder = decoder
        self._settings = settings
        self._chat: Optional[ChatPrompt] = None
        form = None if settings.template == "chat" else settings.template
        try:
            self._chat = make_chat_prompt(engine.tokenizer, settings.chat_template, form)
        except TokenizerError as error:
            if settings.chat_template or settings.template:
                raise
            self._why_not = str(error)  # completions work without it

    @property
    def ends(self) -> FrozenSet[int]:
        """Tokens that end the assistant's turn."""
        return self._chat.ends if self._chat is not None else frozenset()

    def tokens(
        self, prompt: Union[str, Sequence[int]], add_special_tokens: bool, second: Optional[str] = None
    ) -> List[int]:
        """Returns the tokens of a text, or of two texts as the tokenizer joins them; token ids are unchanged."""
        if not isinstance(prompt, str):
            return list(prompt)
        return list(self._tokenizer.encode(prompt, second, add_special_tokens=add_special_tokens, verbose=False))

    def text(self, prompt: Union[str, Sequence[int]]) -> str:
        """Returns the text of token ids; a text is unchanged."""
        return prompt if isinstance(prompt, str) else self._decoder.decode(prompt)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Optional[Sequence[Tool]] = None,
        variables: Optional[Mapping[str, Any]] = None,
    ) -> List[int]:
        """Returns the tokens of a conversation, with the beginning of the assistant's turn.

        ``variables`` are further variables of the template.

        Raises ApiError, 400, if the model has no chat template, or RequestError if the messages do not fit into it.
        """
        if self._chat is None:
            raise ApiError(f"This model cannot chat: use /v1/completions. {self._why_not}", code="no_chat_template")
        shown = [tool.model_dump(exclude_none=True) for tool in tools or ()]
        return self._chat.tokens([message.for_template() for message in messages], shown or None, variables)

    def thoughts(self, prompt: List[int], wanted: bool) -> Optional[Thoughts]:
        """Returns the thoughts that the answer to a chat may have, by template and end of the prompt; None for none.

        Unless a thought is ``wanted``, the prompt gets an empty one, if the template has no switch against thoughts.
        """
        marks = marks_of(self._template)
        thoughts = None if marks is None else thoughts_after(prompt, self._tokenizer, marks)
        if thoughts is None or wanted:
            return thoughts
        prompt += tokenizers.encode(self._tokenizer, thoughts.nothing)
        return None

    @property
    def _template(self) -> str:
        return getattr(self._chat, "template", "")

    def tool_format(self) -> ToolFormat:
        """Returns the model's form of tool calls; raises ApiError, 400, if its chat template has none."""
        form = format_of(self._template)
        if form is None:
            raise ApiError(
                "tools needs a chat template that shows tools as Hermes, Qwen or Llama 3 do, which this model lacks: "
                "leave tools out.",
                code="unsupported_field",
                param="tools",
            )
        return form

    @property
    def own_tokens(self) -> Sequence[str]:
        """The texts that were added to the tokenizer as single tokens."""
        return tuple(self._tokenizer.get_added_vocab())

    def bad_words(self, words: Sequence[str]) -> Tuple[Tuple[int, ...], ...]:
        """Returns the tokens of words that an answer must not contain, each inside a word and at the start of one."""
        texts = [f"{before}{word.lstrip()}" for word in words for before in ("", " ")]
        return tuple(tuple(self.tokens(text, add_special_tokens=False)) for text in texts)

    def check_text(self, tokens: Sequence[int], field: str, limit: Optional[int] = None) -> None:
        """Checks the tokens of a text that is only read; ``limit`` is the model's stated maximum, if any.

        Raises ApiError, 400, that names the field, if there are none or too many.
        """
        limits = (limit, self._seq_length, self._settings.max_prompt_tokens)
        most = min(value for value in limits if value is not None)
        if not tokens:
            raise ApiError(f"A text of {field} has no tokens: leave it out.", param=field)
        if len(tokens) > most:
            message = f"A text of {field} has {len(tokens)} tokens, but this server takes {most} at most: shorten it."
            raise ApiError(message, code="context_length_exceeded", param=field)

    def room(self, tokens: Sequence[int], asked: Optional[int], default: Optional[int]) -> int:
        """Returns the maximum number of tokens of the answer to a prompt, given the request's max_tokens, ``asked``.

        Without max_tokens, ``default`` applies; None for as many as fit.

        Raises ApiError, 400, if the prompt is empty, or prompt or answer are longer than allowed.
        """
        count = len(tokens)
        most = self._settings.max_prompt_tokens
        answer = self._settings.max_output_tokens
        if not count:
            raise ApiError(f"The prompt has {count} tokens: send at least one.", param="prompt")
        if most is not None and count > most:
            raise _too_long(f"The prompt has {count} tokens, but this server takes {most} at most: shorten it.")
        if asked is not None and answer is not None and asked > answer:
            raise ApiError(f"max_tokens is {asked}; it must be at most {answer} on this server.", param="max_tokens")
        left = self._seq_length - count
        needed = 1 if asked is None else asked
        if left < needed:
            raise _too_long(
                f"The model takes {self._seq_length} tokens, prompt and answer together: the prompt has {count}, and "
                f"max_tokens is {needed}. Shorten the prompt, or lower max_tokens."
            )
        if asked is not None:
            return asked
        return min(value for value in (left, answer, default) if value is not None)


def _too_long(message: str) -> ApiError:
    return ApiError(message, code="context_length_exceeded", param="prompt")
