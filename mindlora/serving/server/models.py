"""/v1/models: the base and its adapters, and /v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

import gzip
import json
import logging
import re
from typing import Any, Dict, List, Literal, Optional, Tuple

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mindlora.serving.server import schemas
from mindlora.serving.server.errors import ApiError

# Answers of /v1/models, as pydantic models.


class Model(BaseModel):
    """The base, or an adapter, whose parent is the base."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: Optional[str]
    max_model_len: int


class ModelPage(BaseModel):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: List[Model]


logger = logging.getLogger("mindlora")


class ModelList:
    """The models that requests can name; the list is rebuilt only when it has changed.

    ``created`` is the time shown for all of them, in seconds since the epoch.

    Raises ConfigError if an adapter has the base's name, so that requests could not choose it.
    """

    def __init__(self, engine: Any, created: int):
        self._engine = engine
        engine.adapters.registry.check_base_name(engine.model_name)
        self._created = created
        # The names, and the answer in plain and compressed form: replaced together, as several threads look.
        self._rendered: Tuple[Optional[List[str]], bytes, bytes] = (None, b"", b"")

    def adapter(self, model: str) -> Optional[str]:
        """Returns the adapter that a request means by ``model``; None for the base."""
        return None if model == self._engine.model_name else model

    def check(self, model: str) -> None:
        """Raises AdapterNotFoundError if a model is neither the base nor a registered adapter.

        It sometimes reads the disk, so it is called in a thread.
        """
        adapter = self.adapter(model)
        if adapter is not None:
            registry = self._engine.adapters.registry
            registry.refresh()
            registry.path(adapter)

    def entry(self, model: str) -> Model:
        """Returns the description of a model; raises AdapterNotFoundError if there is none of that name."""
        self.check(model)
        return self._entry(model)

    def page(self, zipped: bool) -> bytes:
        """Returns the list as JSON, optionally compressed by gzip."""
        names = self._engine.adapters.registry.names()
        rendered = self._rendered
        if names != rendered[0]:
            base = self._engine.model_name
            if base in names:
                logger.warning("A folder of adapters is called %s, as the base, and is left out: rename it.", base)
            others = [name for name in names if name != base]
            entries = [self._entry(name).model_dump() for name in (base, *others)]
            plain = json.dumps({"object": "list", "data": entries}, separators=(",", ":")).encode()
            rendered = self._rendered = (names, plain, gzip.compress(plain))
        return rendered[2] if zipped else rendered[1]

    def _entry(self, name: str) -> Model:
        base = self._engine.model_name
        return Model(
            id=name,
            object="model",
            created=self._created,
            owned_by="mindlora",
            root=name,
            parent=None if name == base else base,
            max_model_len=self._engine.seq_length,
        )


def add_routes(router: APIRouter) -> None:
    """Adds all four routes; unless the operator allows loading at run time, the last two only say so."""

    @router.get("/v1/models", response_model=ModelPage)
    def list_models(request: Request) -> Response:
        zipped = _takes_gzip(request.headers.get("accept-encoding", ""))
        headers = {"Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if zipped else {})}
        return Response(request.app.state.context.models.page(zipped), 200, headers, "application/json")

    @router.get("/v1/models/{model:path}", response_model=Model)
    def show_model(model: str, request: Request) -> Model:
        return request.app.state.context.models.entry(model)

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    def load_adapter(body: schemas.LoadAdapterRequest, request: Request) -> Response:
        _check_allowed(request)
        body.check_extra()
        context = request.app.state.context
        name = body.lora_name
        if name == context.engine.model_name:
            raise ApiError(f"{name} is the base's name: give the adapter another.", param="lora_name")
        context.engine.adapters.register(name, body.lora_path, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    def unload_adapter(body: schemas.UnloadAdapterRequest, request: Request) -> Response:
        _check_allowed(request)
        body.check_extra()
        request.app.state.context.engine.adapters.unregister(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _takes_gzip(accepted: str) -> bool:
    """Returns whether a client accepts gzip, by its header Accept-Encoding: 0 means no, and * all other encodings."""
    refused: Dict[str, bool] = {}
    for coding in accepted.lower().split(","):
        name, _, weight = coding.replace(" ", "").partition(";")
        refused[name] = re.fullmatch(r"q=0(\.0*)?", weight) is not None
    return not refused.get("gzip", refused.get("*", True))


def _check_allowed(request: Request) -> None:
    if not request.app.state.context.settings.allow_runtime_loading:
        raise ApiError(
            "Adapters cannot be loaded or unloaded while this server runs: start it with --allow-runtime-loading.",
            403,
            "runtime_loading_disabled",
        )
