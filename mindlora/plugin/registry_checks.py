"""Classes that a YAML names, which MindFormers looks up only when the network is built: callbacks, optimizer, ..."""

import inspect
from typing import Any, Iterator, List, Tuple

from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister

from mindlora.common.text import suggestion
from mindlora.plugin import hooks  # noqa: F401  registers mindlora's classes

# Key of the YAML -> the kind of class that its ``type`` names.
_KINDS = {
    "optimizer": MindFormerModuleType.OPTIMIZER,
    "lr_schedule": MindFormerModuleType.LR,
    "runner_wrapper": MindFormerModuleType.WRAPPER,
    "metric": MindFormerModuleType.METRIC,
}


def registry_mistakes(config: MindFormerConfig) -> Iterator[str]:
    """Yields a sentence for each class that the YAML names and that does not exist, or lacks an argument it is given.

    Args:
        config (MindFormerConfig): The whole YAML.
    """
    for key, kind in _KINDS.items():
        for node in _nodes(config.get(key)):
            yield from _unknown(key, kind, node)
    for number, callback in enumerate(config.callbacks or []):
        where = f"callbacks.{number}"
        yield from _unknown(where, MindFormerModuleType.CALLBACK, callback)
        yield from _wrong_arguments(where, callback)


def _nodes(node: Any) -> List[dict]:
    return [found for found in (node if isinstance(node, list) else [node]) if isinstance(found, dict)]


def _unknown(where: str, kind: str, node: dict) -> Iterator[str]:
    name = node.get("type")
    # A class of the user's own is registered when MindFormers imports the module that auto_register names.
    if name is None or node.get("auto_register") or MindFormerRegister.is_exist(kind, name):
        return
    yield f"{where}.type is {name!r}, which is not registered.{suggestion(str(name), sorted(_names(kind)))}"


def _names(kind: str) -> List[str]:
    return [name for name in MindFormerRegister.registry.get(kind, {}) if not name.startswith("_")]


def _wrong_arguments(where: str, node: dict) -> Iterator[str]:
    name = node.get("type")
    if node.get("auto_register") or not MindFormerRegister.is_exist(MindFormerModuleType.CALLBACK, name):
        return
    known, takes_any = _parameters(MindFormerRegister.get_cls(MindFormerModuleType.CALLBACK, name))
    if takes_any:
        return
    for argument in node:
        if argument not in ("type", *known):
            yield f"{where} is {name}, which has no argument {argument!r}.{suggestion(argument, known)}"


def _parameters(kind: type) -> Tuple[List[str], bool]:
    """Returns the names of a class's arguments, and whether it takes any others."""
    parameters = [found for name, found in inspect.signature(kind.__init__).parameters.items() if name != "self"]
    takes_any = any(found.kind is found.VAR_KEYWORD for found in parameters)
    return [found.name for found in parameters if found.kind is not found.VAR_KEYWORD], takes_any
