"""/v1/completions."""

from typing import Any, Dict, List, Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mindlora.serving.server import fields, schemas
from mindlora.serving.server.context import Context, context_of
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.generation import answer, check, note
from mindlora.serving.server.logprobs import TokenTexts, for_completion, joined

# OpenAI's.
_MAX_TOKENS = 16


class CompletionForm:
    """An answer as /v1/completions shows it.

    Args:
        model (str): As the request names it.
        texts (TokenTexts): Texts of single tokens.

    Attributes:
        echoes (list of str): What comes before each answer; empty for nothing.
    """

    def __init__(self, model: str, texts: TokenTexts):
        self._model, self._texts = model, texts
        self.echoes: Sequence[str] = ()
        self._offsets: Dict[int, int] = {}
        self._head: Dict[str, Any] = {}

    def begin(self, identity: str, created: int) -> None:
        """Takes what the whole answer and every chunk of it begin with."""
        self._head = {"id": f"cmpl-{identity}", "object": "text_completion", "created": created, "model": self._model}

    def chunks(self, choice: int, piece: Any) -> List[schemas.CompletionChoice]:
        """Returns the choice that shows a piece, if there is something to show."""
        echo = self.echoes[choice] if self.echoes and choice not in self._offsets else ""
        offset = self._offsets.setdefault(choice, len(echo))
        text, logprobs = echo + piece.text, None
        if piece.logprobs:
            logprobs = for_completion(self._texts, piece.logprobs, offset)
            self._offsets[choice] += sum(map(len, logprobs.tokens))
        if not (text or logprobs or piece.finish_reason):
            return []
        return [schemas.CompletionChoice(index=choice, text=text, logprobs=logprobs, finish_reason=piece.finish_reason)]

    def chunk(self, choices: Sequence[schemas.CompletionChoice], **usage: Any) -> schemas.Completion:
        """Returns a chunk of a streamed answer."""
        return schemas.Completion(**self._head, choices=choices, **usage)

    def whole(self, choices: Sequence[Sequence[schemas.CompletionChoice]], usage: schemas.Usage) -> schemas.Completion:
        """Returns the answer."""
        found = [
            schemas.CompletionChoice(
                index=index,
                text="".join(part.text for part in parts),
                logprobs=joined([part.logprobs for part in parts]),
                finish_reason=parts[-1].finish_reason,
            )
            for index, parts in enumerate(choices)
        ]
        return schemas.Completion(**self._head, choices=found, usage=usage)


def add_routes(router: APIRouter) -> None:
    """Adds /v1/completions."""

    @router.post("/v1/completions", response_model=schemas.Completion)
    async def complete(body: schemas.CompletionRequest, request: Request) -> Response:
        context, prompts, count = context_of(request), body.prompts(), body.n or 1
        note(request, body, len(prompts) * count, prompts)
        check(body, fields.COMPLETION, context, len(prompts))
        _check_echo(body)
        form = CompletionForm(body.model, context.texts)

        def tokens(context: Context) -> List[List[int]]:
            form.echoes = [context.prompts.text(prompt) for prompt in prompts for _ in range(count) if body.echo]
            return [context.prompts.tokens(prompt, body.add_special_tokens is not False) for prompt in prompts]

        return await answer(request, body, form, tokens, body.max_tokens, _MAX_TOKENS)


def _check_echo(body: schemas.CompletionRequest) -> None:
    if body.echo and body.logprobs is not None:
        raise ApiError(
            "echo with logprobs is not supported: this server reports logprobs of the answer alone.",
            code="unsupported_field",
            param="echo",
        )
