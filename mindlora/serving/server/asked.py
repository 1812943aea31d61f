"""Asked: base class of all objects in a request, with the check of their fields."""

from typing import Annotated, Any, ClassVar, Dict, Tuple

from pydantic import AfterValidator, BaseModel, ConfigDict

from mindlora.serving.server.errors import ApiError


def _whole_characters(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"valid Unicode, not half of a surrogate pair ({text[error.start]!r})") from error
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]

# They only describe the request.
_NOTES = ("metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier", "user")
# Field -> values besides null that have no effect.
Table = Dict[str, Tuple[Any, ...]]


class Asked(BaseModel):
    """An object in a request.

    Attributes:
        unsupported (dict): Fields of OpenAI's and vLLM's APIs that this server lacks. They are accepted as long as they
            have no effect.
        passes_unknown (bool): Whether fields of any other name pass. They do in messages, which may come from another
            server with fields of its own.
    """

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Table] = {}
    passes_unknown: ClassVar[bool] = False

    def check_extra(self, where: str = "") -> None:
        """Checks the fields that the schema does not declare, here and in all objects within.

        Raises ApiError, 400, if one would have an effect or is unknown.
        ``where`` is this object's path in the request, followed by a dot; "" for the request itself.
        """
        self._check_own_extra(where)
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, Asked):
                value.check_extra(f"{where}{name}.")
            # Lists have items of one kind: lists of tokens are long, and need no check.
            elif isinstance(value, list) and value and isinstance(value[0], Asked):
                for number, each in enumerate(value):
                    each.check_extra(f"{where}{name}.{number}.")

    def _check_own_extra(self, where: str) -> None:
        for name, value in (self.model_extra or {}).items():
            path = f"{where}{name}"
            if value is None:
                continue
            if name in self.unsupported:
                if value not in self.unsupported[name]:
                    raise ApiError(
                        f"{path} is not supported by this server: leave it out.", code="unsupported_field", param=path
                    )
            elif not self.passes_unknown and (where or name not in _NOTES):
                raise ApiError(
                    f"{path} is not a field of this request: leave it out.", code="unknown_field", param=path
                )
