"""What of a YAML is carried out under MindFormers' PyNative Trainer; all else of graph mode is refused by name."""

from typing import Any, Mapping

from mindlora.core.errors import ConfigError
from mindlora.core.text import listed
from mindlora.training.callbacks.order import ORDER

# Callbacks that need what graph mode alone has.
_GRAPH_MODE_ALONE = (
    *("BaseCheck", "BaseWeights", "LoraInitialization", "AdapterSlices", "ExchangeCheck", "RankBudget"),
    *("Forgetting", "ForgettingBudget", "SampleAnswers", "EachAdapter", "ReferenceCheck"),
)
CALLBACKS = tuple(name for name in ORDER if name not in _GRAPH_MODE_ALONE)
# Nodes of a graph-mode YAML -> what the PyNative Trainer has for them. It ignores a node that it does not know.
NODES = {
    "runner_wrapper": "there is no train step to choose",
    "runner_config": "use training, with steps, local_batch_size and global_batch_size",
    "lr_schedule": "use lr_scheduler",
    "load_checkpoint": "use checkpoint.load_path",
    "train_dataset_task": "use train_dataset.dataloader",
    "parallel": "use parallelism",
    "parallel_config": "use parallelism",
    "resume_training": "use checkpoint.load_path and checkpoint.no_load_optim: False",
}


def check_nodes(config: Any) -> None:
    """Raises ConfigError if the YAML of a PyNative run (TrainConfig) has a node or a callback of graph mode alone."""
    for name, instead in NODES.items():
        if getattr(config, name, None):
            raise ConfigError(
                f"The YAML has {name}, which MindFormers' PyNative Trainer does not read. Remove it: {instead}."
            )
    refused = [name for name in _types(config) if name in _GRAPH_MODE_ALONE]
    if refused:
        raise ConfigError(
            f"callbacks has {listed(refused)}, which mindlora does not carry out under MindFormers' PyNative Trainer. "
            "Remove it, or train in graph mode."
        )


def _types(config):
    nodes = [node.to_dict() if hasattr(node, "to_dict") else node for node in config.callbacks or []]
    return [node.get("type") for node in nodes if isinstance(node, Mapping)]
