"""/v1/chat/completions."""

from typing import Any, Dict, List, Sequence, Set

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.server import fields, schemas
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import answer, check, note
from mindlora.serving.server.logprobs import TokenTexts, for_chat, joined


class ChatForm:
    """An answer as /v1/chat/completions shows it.

    Args:
        model (str): As the request names it.
        texts (TokenTexts): Texts of single tokens.
    """

    def __init__(self, model: str, texts: TokenTexts):
        self._model, self._texts = model, texts
        self._begun: Set[int] = set()
        self._head: Dict[str, Any] = {}

    def begin(self, identity: str, created: int) -> None:
        """Takes what the whole answer and every chunk of it begin with."""
        self._head = {"id": f"chatcmpl-{identity}", "created": created, "model": self._model}

    def chunks(self, choice: int, piece: Any) -> List[schemas.ChatChoice]:
        """Returns what shows a piece: first the role, then each time what there is to add."""
        found = []
        if choice not in self._begun:
            self._begun.add(choice)
            found.append(self._choice(choice, schemas.Answer(role="assistant", content=""), None, None))
        logprobs = for_chat(self._texts, piece.logprobs) if piece.logprobs else None
        if piece.text or logprobs or piece.finish_reason:
            delta = schemas.Answer(content=piece.text) if piece.text else schemas.Answer()
            found.append(self._choice(choice, delta, logprobs, piece.finish_reason))
        return found

    def chunk(self, choices: Sequence[schemas.ChatChoice], **usage: Any) -> schemas.ChatCompletion:
        """Returns a chunk of a streamed answer."""
        return schemas.ChatCompletion(object="chat.completion.chunk", **self._head, choices=choices, **usage)

    def whole(self, choices: Sequence[Sequence[schemas.ChatChoice]], usage: schemas.Usage) -> schemas.ChatCompletion:
        """Returns the answer."""
        found = [
            schemas.ChatChoice(
                index=index,
                message=schemas.Answer(role="assistant", content="".join(part.delta.content or "" for part in parts)),
                logprobs=joined([part.logprobs for part in parts]),
                finish_reason=parts[-1].finish_reason,
            )
            for index, parts in enumerate(choices)
        ]
        return schemas.ChatCompletion(object="chat.completion", **self._head, choices=found, usage=usage)

    def _choice(self, index, delta, logprobs, reason):
        return schemas.ChatChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)


def add_routes(router: APIRouter) -> None:
    """Adds /v1/chat/completions."""

    @router.post("/v1/chat/completions", response_model=schemas.ChatCompletion)
    async def complete_chat(body: schemas.ChatRequest, request: Request) -> Response:
        context = context_of(request)
        note(request, body, body.n or 1, [message.for_template() for message in body.messages])
        check(body, fields.CHAT, context, 1)
        _check_messages(body)
        form = ChatForm(body.model, context.texts)

        def tokens(context: Context) -> List[List[int]]:
            return [context.prompts.chat(body.messages)]

        return await answer(request, body, form, tokens, body.max_completion_tokens or body.max_tokens, None)


def _check_messages(body: schemas.ChatRequest) -> None:
    for number, message in enumerate(body.messages):
        fields.check(message.model_extra, fields.MESSAGE, f"messages.{number}.")
        for place, part in enumerate(message.content if isinstance(message.content, list) else ()):
            fields.check(part.model_extra, fields.PLAIN_PART, f"messages.{number}.content.{place}.")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs is only for logprobs: true.", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise ApiError("max_tokens and max_completion_tokens differ: give one of them.", param="max_tokens")
