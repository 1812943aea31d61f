"""/tokenize and /detokenize: the tokens that the model gets for a prompt or a conversation, and back, as in vLLM."""

from typing import Optional

from fastapi import APIRouter
from starlette.requests import Request

from mindlora.serving.server import schemas
from mindlora.serving.server.context import context_of
from mindlora.serving.server.errors import ApiError


def add_routes(router: APIRouter) -> None:
    """Adds both. They compute nothing, so they answer while the engine is busy."""

    @router.post("/tokenize", response_model=schemas.Tokens)
    def tokenize(body: schemas.TokenizeRequest, request: Request) -> schemas.Tokens:
        body.check_extra()
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(
                "The body of /tokenize has both prompt and messages, or neither: give one of them.", param="prompt"
            )
        context = context_of(request)
        _check_model(request, body.model)
        if body.prompt is not None:
            tokens = context.prompts.tokens(body.prompt, body.add_special_tokens is not False)
        else:
            tokens = context.prompts.chat(body.messages or [], body.tools, body.chat_template_kwargs)
        texts = [context.texts.text(token) for token in tokens] if body.return_token_strs else None
        length = context.engine.seq_length
        return schemas.Tokens(count=len(tokens), max_model_len=length, tokens=tokens, token_strs=texts)

    @router.post("/detokenize", response_model=schemas.Detokenized)
    def detokenize(body: schemas.DetokenizeRequest, request: Request) -> schemas.Detokenized:
        body.check_extra()
        _check_model(request, body.model)
        return schemas.Detokenized(prompt=context_of(request).prompts.text(body.tokens))


def _check_model(request: Request, model: Optional[str]) -> None:
    if model is not None:
        context_of(request).models.check(model)
