"""The keys of a MindFormers YAML that mindlora reads: one table of their valid values and defaults."""

from typing import Any, Dict, Mapping, NamedTuple, Optional

from mindlora.core.fields import COUNT, INDEX, NOT_NEGATIVE, POSITIVE, SHARE, Range
from mindlora.core.yaml_file import PET
from mindlora.models.label_losses import IN_GRAPH_MODE as LOSS_IN_PIECES
from mindlora.models.label_losses import PIECES

MODEL = "model.model_config"
_NODE = Range("a node with keys below it, each as 'key: value'", lambda node: True, (Mapping,))
PATH = Range("a path", lambda path: True, (str,))
SHAPES = (_NODE, PATH)
_SCALE = Range(
    "a number above 0",
    lambda scale: "type" in scale if isinstance(scale, Mapping) else scale in POSITIVE,
    (int, float, Mapping),
)
_DEVICE = Range("Ascend or CPU", lambda target: target in ("Ascend", "CPU"), (str,))
_MODE = Range(
    "0 for graph mode or 1 for PyNative mode", lambda mode: mode in (0, 1, "GRAPH_MODE", "PYNATIVE_MODE"), (int, str)
)


class Key(NamedTuple):
    """The valid values of a key of a YAML.

    Attributes:
        range (Range): Its values; None if only MindFormers judges them.
        default: MindFormers' default.
        training (bool): Whether only training reads it.
        other_name (str): The last part of another name of the same key.
        required (bool): Whether it must have a value if it is named.
    """

    range: Optional[Range]
    default: Any = None
    training: bool = False
    other_name: str = ""
    required: bool = False


_NODES = (
    *("runner_wrapper.preference", "runner_wrapper.rl"),
    *("trainer", "runner_config", "optimizer", "lr_schedule", "runner_wrapper", "context", "parallel"),
    *("parallel_config", "recompute_config", "swap_config", "moe_config", "checkpoint", "train_dataset_task"),
    *("train_dataset", "train_dataset.data_loader", "eval_dataset", "eval_dataset.data_loader", "eval_dataset_task"),
    *("processor", "processor.tokenizer", "model", "model.arch", MODEL, PET),
)
_PATHS = (
    *("load_checkpoint", "checkpoint.load_path", "pretrained_model_dir", "output_dir", f"{PET}.adapter_path"),
    *("train_dataset.data_loader.dataset_dir", "eval_dataset.data_loader.dataset_dir"),
)
KEYS: Dict[str, Key] = {
    **{name: Key(_NODE) for name in _NODES},
    **{name: Key(PATH) for name in _PATHS},
    "seed": Key(INDEX, 1),
    "micro_batch_interleave_num": Key(COUNT, 1),
    "context.device_target": Key(_DEVICE, "Ascend"),
    "context.mode": Key(_MODE, 0),
    "parallel.parallel_mode": Key(None, 1),
    "parallel_config.data_parallel": Key(COUNT, 1),
    "parallel_config.model_parallel": Key(COUNT, 1),
    "parallel_config.pipeline_stage": Key(COUNT, 1),
    "parallel_config.context_parallel": Key(COUNT, 1),
    "parallel_config.expert_parallel": Key(COUNT, 1),
    "parallel_config.micro_batch_num": Key(COUNT, 1),
    "moe_config.expert_num": Key(COUNT, 1),
    f"{MODEL}.moe_config.expert_num": Key(COUNT, 1),
    # Every model needs these.
    f"{MODEL}.seq_length": Key(COUNT, required=True),
    f"{MODEL}.hidden_size": Key(COUNT, required=True),
    f"{MODEL}.vocab_size": Key(COUNT, required=True),
    f"{MODEL}.num_layers": Key(COUNT, other_name="num_hidden_layers", required=True),
    f"{MODEL}.num_heads": Key(COUNT, other_name="num_attention_heads", required=True),
    f"{MODEL}.n_kv_heads": Key(COUNT, other_name="num_key_value_heads"),
    f"{MODEL}.intermediate_size": Key(COUNT, other_name="ffn_hidden_size"),
    f"{MODEL}.num_blocks": Key(COUNT),
    f"{MODEL}.block_size": Key(COUNT),
    f"{MODEL}.num_experts_per_tok": Key(COUNT, other_name="moe_router_topk"),
    "runner_config.epochs": Key(COUNT, 1, training=True, required=True),
    "runner_config.batch_size": Key(COUNT, 1, training=True, required=True),
    "runner_config.gradient_accumulation_steps": Key(COUNT, 1, training=True),
    "runner_config.sink_mode": Key(None, True, training=True),
    "runner_config.sink_size": Key(None, 1, training=True),
    "lr_schedule.learning_rate": Key(NOT_NEGATIVE, training=True),
    "lr_schedule.warmup_ratio": Key(SHARE, training=True),
    "optimizer.learning_rate": Key(NOT_NEGATIVE, training=True),
    "optimizer.weight_decay": Key(NOT_NEGATIVE, training=True),
    "runner_wrapper.max_grad_norm": Key(POSITIVE, training=True),
    "runner_wrapper.scale_sense": Key(_SCALE, training=True),
    LOSS_IN_PIECES: Key(PIECES, True, training=True),
    "train_dataset.num_parallel_workers": Key(COUNT, training=True),
}
