"""Is each node of a MindFormers YAML of the kind that it must be: keys, a list, a path? Imports no MindFormers."""

from typing import Any, Iterator, List, Mapping

from mindlora.common.text import shown
from mindlora.common.yaml_file import value_at
from mindlora.errors import ConfigMistakes

_WITH_KEYS = (
    "trainer",
    "runner_config",
    "optimizer",
    "lr_schedule",
    "runner_wrapper",
    "context",
    "parallel",
    "parallel_config",
    "train_dataset",
    "train_dataset.data_loader",
    "train_dataset_task",
    "eval_dataset",
    "eval_dataset.data_loader",
    "eval_dataset_task",
    "checkpoint",
    "processor",
    "processor.tokenizer",
    "model",
    "model.arch",
    "model.model_config",
    "model.model_config.pet_config",
)
_LISTS = ("callbacks", "eval_callbacks")
_PATHS = (
    "load_checkpoint",
    "checkpoint.load_path",
    "pretrained_model_dir",
    "output_dir",
    "train_dataset.data_loader.dataset_dir",
    "eval_dataset.data_loader.dataset_dir",
    "model.model_config.pet_config.adapter_path",
)
# Arguments of callbacks that are paths.
_CALLBACK_PATHS = ("dataset_dir", "directory")


def shape_mistakes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each node that is of another kind than MindFormers and mindlora take.

    Args:
        config (mapping): The content of the YAML.
    """
    for key in _WITH_KEYS:
        node = value_at(config, key)
        # MindFormers takes an empty node for one that is missing.
        if node is not None and not isinstance(node, Mapping):
            yield f"{key} is {shown(node)}, but it must be a node with keys below it, each as 'key: value'."
    for key in _PATHS:
        yield from _wrong_path(key, value_at(config, key))
    for key in _LISTS:
        yield from _wrong_list(key, config.get(key))


def refuse_wrong_shape(config: Mapping[str, Any]) -> None:
    """Raises ConfigMistakes with all of them, if there are any."""
    found = list(shape_mistakes(config))
    if found:
        raise ConfigMistakes(found)


def _wrong_list(key: str, items: Any) -> Iterator[str]:
    if items is None:
        return
    if not isinstance(items, list):
        yield f"{key} is {shown(items)}, but it must be a list: a line '- type: ...' for each item."
        return
    for number, item in enumerate(items):
        if not isinstance(item, Mapping) or not isinstance(item.get("type"), str):
            yield f"{key}.{number} is {shown(item)}, which has no type: write '- type: ...' and its settings below it."
            continue
        for name in _CALLBACK_PATHS:
            yield from _wrong_path(f"{key}.{number} ({item['type']}): {name}", item.get(name))


def _wrong_path(key: str, value: Any) -> List[str]:
    if not value and not isinstance(value, bool) or isinstance(value, str):
        return []
    return [f"{key} is {shown(value)}, but it must be a path."]
