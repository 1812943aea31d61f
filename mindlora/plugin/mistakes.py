"""All that is wrong in a YAML and would fail only after the network is built, at once."""

from typing import Iterator, List, Optional

from mindformers.tools.register import MindFormerConfig

from mindlora.checks.base import base_mistakes
from mindlora.checks.keys import number_mistakes
from mindlora.common.run_modes import TRAINING_MODES
from mindlora.common.text import suggestion
from mindlora.errors import ConfigMistakes
from mindlora.plugin.data_rows import data_mistakes, labels_left_out
from mindlora.plugin.log import logger
from mindlora.plugin.registry_checks import ignored_settings, registry_mistakes

_METRICS = ["held_out_loss", "loss"]


def find_mistakes(config: MindFormerConfig) -> List[str]:
    """Returns a sentence for each mistake, with what to change.

    Args:
        config (MindFormerConfig): The whole YAML.
    """
    model, callbacks, training = config.model.model_config, config.callbacks or [], config.run_mode in TRAINING_MODES
    return [
        *number_mistakes(config, training),
        *_model_mistakes(model),
        *registry_mistakes(config),
        *(_adapter_mistakes(model, callbacks) if training else ()),
        *(_metric_mistakes(callbacks, config.do_eval) if training else ()),
        *base_mistakes(config),
        *data_mistakes(config),
    ]


def find_warnings(config: MindFormerConfig) -> List[str]:
    """Returns a sentence for each thing that does not end the run and is hardly meant.

    Args:
        config (MindFormerConfig): The whole YAML.
    """
    return [*ignored_settings(config), *labels_left_out(config)]


def refuse_mistakes(config: MindFormerConfig) -> None:
    """Raises ConfigMistakes with all of them, if there are any, and logs what find_warnings finds."""
    for found in find_warnings(config):
        logger.warning(found)
    found = find_mistakes(config)
    if found:
        raise ConfigMistakes(found)


def _model_mistakes(model: MindFormerConfig) -> Iterator[str]:
    hidden, heads = (model.get(name) for name in ("hidden_size", "num_heads"))
    heads = heads or model.get("num_attention_heads")
    groups = model.get("n_kv_heads") or model.get("num_key_value_heads")
    # Where the size of a head is set, it need not be hidden_size / num_heads.
    own_size = model.get("head_dim") or model.get("kv_channels") or model.get("qk_head_dim")
    if _whole(hidden, heads) and not own_size and hidden % heads:
        yield f"model_config.hidden_size is {hidden}, which num_heads {heads} does not divide. Correct one of the two."
    if _whole(heads, groups) and heads % groups:
        yield f"model_config.num_heads is {heads}, which n_kv_heads {groups} does not divide. Correct one of the two."


def _adapter_mistakes(model: MindFormerConfig, callbacks: List[dict]) -> Iterator[str]:
    for number, callback in enumerate(callbacks):
        if callback.get("type") == "LoraCheckpoint" and not model.get("pet_config"):
            yield (
                f"callbacks.{number} is LoraCheckpoint, which saves adapters, and model_config has no pet_config. Add "
                "pet_config, or save with CheckpointMonitor."
            )


def _metric_mistakes(callbacks: List[dict], do_eval: Optional[bool]) -> Iterator[str]:
    """What keeps LoraCheckpoint from choosing the best adapter."""
    yield from _held_out_mistakes(callbacks)
    if do_eval or any(callback.get("auto_register") for callback in callbacks):
        # These may report metrics of their own.
        return
    for number, callback in enumerate(callbacks):
        metric = callback.get("best_metric", "loss")
        if callback.get("type") == "LoraCheckpoint" and metric not in _METRICS:
            known = suggestion(str(metric), _METRICS)
            yield f"callbacks.{number} (LoraCheckpoint): best_metric is {metric!r}, which nothing reports.{known}"


def _held_out_mistakes(callbacks: List[dict]) -> Iterator[str]:
    measuring = [callback for callback in callbacks if callback.get("type") == "HeldOutLoss"]
    for number, callback in enumerate(callbacks):
        if callback.get("type") != "LoraCheckpoint" or callback.get("best_metric") != "held_out_loss":
            continue
        where, saved = f"callbacks.{number} (LoraCheckpoint)", callback.get("save_steps", 100)
        if not measuring:
            yield f"{where}: best_metric is held_out_loss, and callbacks has no HeldOutLoss, which measures it. Add it."
            return
        measured = measuring[0].get("every_steps", 100)
        if _whole(saved, measured) and saved % measured:
            yield (
                f"{where}: save_steps is {saved}, and HeldOutLoss measures every {measured} steps, so at some saves "
                f"there is no held_out_loss. Set save_steps to a multiple of every_steps, such as {measured}."
            )


def _whole(*values) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) and value > 0 for value in values)
