"""Context: the state that all handlers of a server share."""

import time
from typing import Any

from starlette.requests import Request

from mindlora.serving.constraints import ConstraintCompiler
from mindlora.serving.detokenizer import TextDecoder, TokenTexts
from mindlora.serving.server.access import ApiKeys, KeyLimits
from mindlora.serving.server.errors import ApiError, as_api_error
from mindlora.serving.server.metrics import Metrics
from mindlora.serving.server.models import ModelList
from mindlora.serving.server.prompts import Prompts
from mindlora.serving.server.request_log import RequestLog
from mindlora.serving.server.settings import ServerSettings


class Context:
    """An engine and the server's state beside it.

    Attributes:
        starting (bool): Whether the engine is not ready for requests yet.
        draining (bool): Whether the server is about to stop and takes no more requests.
    """

    def __init__(self, engine: Any, settings: ServerSettings):
        self.engine = engine
        self.settings = settings
        self.draining = False
        self.starting = False
        self.started = int(time.time())
        self.keys = ApiKeys(settings.api_key_file) if settings.api_key_file else None
        self.limits = KeyLimits(settings.key_requests, settings.key_requests_per_minute)
        self.models = ModelList(engine, self.started)
        self.metrics = Metrics(engine, settings.adapter_labels)
        decoder = TextDecoder(engine.tokenizer)
        self.prompts = Prompts(engine, decoder, settings)
        self.texts = TokenTexts(decoder, engine.tokenizer)
        self.constraints = ConstraintCompiler(engine.tokenizer)
        self.log = RequestLog(settings.request_log)

    def told(self, error: BaseException) -> ApiError:
        """Returns the error that a client gets."""
        return as_api_error(error, self.engine.adapters.registry)


def context_of(request: Request) -> Context:
    """Returns the context of the app that handles a request."""
    return request.app.state.context
