"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from mindlora.serving.server import fields, schemas
from mindlora.serving.server.context import context_of
from mindlora.serving.server.errors import ApiError


def add_routes(router: APIRouter) -> None:
    """Adds both; where the operator has not allowed them, they only say so."""

    @router.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    def load_adapter(body: schemas.LoadAdapterRequest, request: Request) -> Response:
        _check_allowed(request)
        fields.check(body.model_extra, {})
        context, name = context_of(request), body.lora_name
        if name == context.engine.model_name:
            raise ApiError(f"{name} is the base's name: give the adapter another.", param="lora_name")
        context.engine.adapters.register(name, body.lora_path, replace=bool(body.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    def unload_adapter(body: schemas.UnloadAdapterRequest, request: Request) -> Response:
        _check_allowed(request)
        fields.check(body.model_extra, {})
        context_of(request).engine.adapters.unregister(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(request: Request) -> None:
    if not context_of(request).settings.allow_runtime_loading:
        raise ApiError(
            "Adapters cannot be loaded or unloaded while this server runs: start it with --allow-runtime-loading.",
            403,
            "runtime_loading_disabled",
        )
