"""Facts about the model under an adapter, from its base's folder or name, or from the adapter's cells."""

import os
from typing import Any, Dict, Mapping, NamedTuple, Optional

from mindlora.core.errors import AdapterError
from mindlora.core.json_files import parse_object
from mindlora.core.text import suggestion
from mindlora.files.adapters.adapter import Adapter
from mindlora.models import names
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture


class KnownBase(NamedTuple):
    """Facts about the model under an adapter.

    Attributes:
        architecture (Architecture): Its record, or None if nothing distinguishes it from a Llama, which has the cells
            of Qwen2, Qwen3 and others.
        reason (str): The fact that decided this, for messages; "" if there was none.
        config (dict): The config.json of the base, if the user names it or the base is a local folder; otherwise empty.
    """

    architecture: Optional[Architecture]
    reason: str
    config: Dict[str, Any]


def known_base(
    adapter: Adapter, architecture: Optional[str] = None, base_config: Optional[Mapping[str, Any]] = None
) -> KnownBase:
    """Returns the facts about the model under ``adapter``, or about the model_type that the user names.

    ``base_config`` takes the place of the config.json of the adapter's base; None if the user names none.
    """
    config = _config_of(adapter.base_model) if base_config is None else dict(base_config)
    if architecture is not None:
        record = registry.by_hugging_face_type(architecture)
        if record is None:
            model_types = registry.hugging_face_types()
            raise AdapterError(
                f"architecture is {architecture!r}, which is not known: {', '.join(model_types)} are."
                f"{suggestion(architecture, list(model_types))}"
            )
        return KnownBase(record, f"architecture is {architecture}", config)
    model_type = str(config.get("model_type"))
    record = registry.by_hugging_face_type(model_type)
    if record:
        source = f"{adapter.base_model}/config.json says" if base_config is None else "its base is a"
        return KnownBase(record, f"{source} {model_type}", config)
    record = registry.by_hub_name(adapter.base_model or "")
    if record:
        return KnownBase(record, f"its base is called {adapter.base_model}", config)
    record = names.architecture_of_cells(adapter.paths)
    return KnownBase(record, f"it has the cells of {record.title}" if record else "", config)


def _config_of(base_model: Optional[str]) -> Dict[str, Any]:
    path = os.path.join(base_model or "", "config.json")
    if not base_model or not os.path.isfile(path):
        return {}
    with open(path, "rb") as file:
        return parse_object(file.read(), path, AdapterError)
