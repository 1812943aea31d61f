"""/v1/chat/completions."""

import functools
import uuid
from typing import Any, Callable, Dict, List, Optional, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.constraints import Constraint
from mindlora.serving.detokenizer import TokenTexts
from mindlora.serving.server import schemas
from mindlora.serving.server.context import Context
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import Form, accept, answer, joined_logprobs
from mindlora.serving.server.prompts import Prompts
from mindlora.serving.server.tool_schemas import Function, NamedTool, demands_call
from mindlora.serving.thoughts import ThoughtReader, Thoughts
from mindlora.serving.tools import CallBegin, CallReader, Part, tool_constraint


class ChatForm(Form):
    """The form of answers of /v1/chat/completions.

    Attributes:
        thoughts (Thoughts or None): The thoughts that answers may begin with; set once the prompt is known.
        thought_tokens (int): Tokens of thoughts so far.
    """

    prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        texts: TokenTexts,
        make_reader: Optional[Callable[[], CallReader]] = None,
        shows_thoughts: bool = True,
    ):
        super().__init__(model, texts)
        self._has_begun = False
        self.thoughts: Optional[Thoughts] = None
        self.thought_tokens = 0
        self._make_reader = make_reader
        self._shows_thoughts = shows_thoughts
        self._readers: Dict[int, _AnswerReader] = {}

    def constrained(self, constraint: Optional[Constraint]) -> Optional[Constraint]:
        """See Form."""
        return constraint if constraint is None or self.thoughts is None else self.thoughts.before(constraint)

    def chunks(self, choice: int, piece: Any) -> List[schemas.ChatChoice]:
        """Returns the choices that show a piece: first the role, then each piece's addition."""
        choices = []
        if choice not in self._readers:
            calls = self._make_reader() if self._make_reader else None
            self._readers[choice] = _AnswerReader(ThoughtReader(self.thoughts), calls, self._shows_thoughts)
            role = schemas.Answer(role="assistant", content="")
            choices.append(schemas.ChatChoice(index=choice, delta=role, logprobs=None, finish_reason=None))
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        reader = self._readers[choice]
        reason = piece.finish_reason
        thought = reader.thinks
        deltas = reader.read(piece.text, reason is not None)
        if thought or reader.thinks:
            self.thought_tokens += len(piece.tokens)
        reason = "tool_calls" if reason is not None and reader.has_called else reason
        ids = self.ids(piece.tokens)
        if not deltas and (logprobs or reason or ids):
            deltas = [schemas.Answer()]
        for delta in deltas:
            choices.append(schemas.ChatChoice(index=choice, delta=delta, logprobs=None, finish_reason=None))
        if deltas:
            choices[-1] = choices[-1].model_copy(update={"logprobs": logprobs, "finish_reason": reason, **ids})
        return choices

    def chunk(self, choices: Sequence[schemas.ChatChoice], **usage: Any) -> schemas.ChatCompletion:
        """See Form."""
        prompt = {} if self._has_begun else self._prompt()
        self._has_begun = True
        return schemas.ChatCompletion(object="chat.completion.chunk", **self.head, choices=choices, **usage, **prompt)

    def whole(self, choices: Sequence[Sequence[schemas.ChatChoice]], usage: schemas.Usage) -> schemas.ChatCompletion:
        """See Form."""
        answers = []
        for index, parts in enumerate(choices):
            message = _joined([part.delta for part in parts])
            reason = parts[-1].finish_reason
            logprobs = joined_logprobs(parts)
            ids = self.joined_ids(parts)
            choice = schemas.ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=reason, **ids)
            answers.append(choice)
        prompt = self._prompt()
        return schemas.ChatCompletion(object="chat.completion", **self.head, choices=answers, usage=usage, **prompt)

    def _prompt(self) -> Dict[str, Any]:
        """Returns the field of the prompt's token ids, if they are shown."""
        return {} if self.prompt_ids is None else {"prompt_token_ids": self.prompt_ids[0]}

    def _logprobs(self, sampled: List[Any]) -> schemas.ChatLogprobs:
        tokens = []
        for entry in sampled:
            top = [schemas.TopLogprob(**self._token(token, value)) for token, value in entry.top]
            tokens.append(schemas.TokenLogprobs(**self._token(entry.token, entry.logprob), top_logprobs=top))
        return schemas.ChatLogprobs(content=tokens)

    def _token(self, token: int, logprob: float) -> Dict[str, Any]:
        return {"token": self.texts.name(token), "logprob": logprob, "bytes": list(self.texts.data(token))}


class _AnswerReader:
    """Splits an answer as it arrives into its thought, if shown, its text and its calls, if any."""

    def __init__(self, thoughts: ThoughtReader, calls: Optional[CallReader], shows_thoughts: bool):
        self._thoughts = thoughts
        self._calls = calls
        self._shows_thoughts = shows_thoughts

    @property
    def thinks(self) -> bool:
        """Whether the next text is part of a thought."""
        return self._thoughts.thinks

    @property
    def has_called(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self._calls is not None and self._calls.complete

    def read(self, text: str, last: bool) -> List[schemas.Answer]:
        """Returns a piece's addition to the answer; ``last`` marks the last piece."""
        thought, text = self._thoughts.read(text, last)
        deltas = []
        if thought and self._shows_thoughts:
            deltas.append(schemas.Answer(reasoning_content=thought, reasoning=thought))
        if self._calls is not None:
            return deltas + [_delta(part) for part in self._calls.read(text, last)]
        return deltas + ([schemas.Answer(content=text)] if text else [])


def _delta(part: Part) -> schemas.Answer:
    """Returns a part's addition to an answer."""
    if isinstance(part, str):
        return schemas.Answer(content=part)
    if isinstance(part, CallBegin):
        function = schemas.CalledFunction(name=part.name, arguments="")
        identity = f"call_{uuid.uuid4().hex[:24]}"
        call = schemas.CalledTool(index=part.number, id=identity, type="function", function=function)
    else:
        call = schemas.CalledTool(index=part.number, function=schemas.CalledFunction(arguments=part.text))
    return schemas.Answer(tool_calls=[call])


def _joined(deltas: Sequence[schemas.Answer]) -> schemas.Answer:
    """Returns the whole message of an answer from its pieces' additions."""
    text = "".join(delta.content or "" for delta in deltas)
    thought = "".join(delta.reasoning_content or "" for delta in deltas)
    calls = _joined_calls(deltas)
    more: Dict[str, Any] = {"reasoning_content": thought, "reasoning": thought} if thought else {}
    if calls:
        more["tool_calls"] = calls
    return schemas.Answer(role="assistant", content=(text or None) if more else text, **more)


def _joined_calls(deltas: Sequence[schemas.Answer]) -> List[schemas.CalledTool]:
    """Returns the complete calls of an answer from its pieces' additions."""
    calls: List[schemas.CalledTool] = []
    for delta in deltas:
        for call in delta.tool_calls or ():
            if call.id is not None:
                function = schemas.CalledFunction(name=call.function.name, arguments="")
                calls.append(schemas.CalledTool(id=call.id, type="function", function=function))
            else:
                calls[-1].function.arguments += call.function.arguments
    return calls


def add_routes(router: APIRouter) -> None:
    """Adds /v1/chat/completions."""

    @router.post("/v1/chat/completions", response_model=schemas.ChatCompletion)
    async def complete_chat(body: schemas.ChatRequest, request: Request) -> Response:
        return await answer_chat(request, body, ChatForm)


async def answer_chat(request: Request, body: schemas.ChatRequest, make_form: Callable[..., ChatForm]) -> Response:
    """Answers a request for a chat completion in a form, which is made of what ChatForm is made of."""
    context = accept(request, body, 1, [message.for_template() for message in body.messages])
    _check_numbers(body)
    functions = body.callable_tools
    make_reader = None
    if functions:
        names = [function.name for function in functions.values()]
        make_reader = functools.partial(
            CallReader, context.prompts.tool_format(), names, demands_call(body.tool_choice)
        )
    form = make_form(body.model, context.texts, make_reader, body.include_reasoning is not False)
    constraint = _constraint(body, functions, context.prompts)

    def tokens(context: Context) -> List[List[int]]:
        prompt = context.prompts.chat(body.messages, body.tools, body.variables())
        form.thoughts = context.prompts.thoughts(prompt, body.thinks)
        return [prompt]

    limit = body.max_completion_tokens or body.max_tokens
    return await answer(request, body, form, tokens, constraint, limit, None)


def _constraint(body: schemas.ChatRequest, functions: Dict[int, Function], prompts: Prompts) -> Optional[Constraint]:
    """Returns the constraint on an answer that may call ``functions``, tools by their place; None for any text."""
    said = body.constraint()
    if not functions:
        return said
    # A named tool is called once.
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    arguments = {
        function.name: Constraint(
            "json", function.arguments, f"tools.{number}.function.parameters", strict=bool(function.strict)
        )
        for number, function in functions.items()
    }
    required = demands_call(body.tool_choice)
    return tool_constraint(prompts.tool_format(), arguments, required, several, prompts.own_tokens, said)


def _check_numbers(body: schemas.ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs is only for logprobs: true. Set logprobs too.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of them.", param="max_tokens")
