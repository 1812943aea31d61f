"""Values of a YAML from the command line: --a.b.c VALUE, and the flags of mindlora-run that set a key."""

import json
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

import yaml

from mindlora.core.errors import ConfigError
from mindlora.core.text import shown, suggestion
from mindlora.core.yaml_file import PET, TRAINING_MODES


def true_or_false(text: str) -> bool:
    """Reads a flag that is True or False. argparse quotes the name of this function in its error message."""
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def true_false_or_name(text: str) -> Union[bool, str]:
    """Reads a flag that is True, False or the name of a file."""
    return {"true": True, "false": False}.get(text.lower(), text)


class Flag(NamedTuple):
    """A flag of mindlora-run that sets the key of the YAML at a dotted path; ``kind`` reads its value."""

    kind: Any
    key: str
    help: str


FLAGS = {
    "mode": Flag(int, "context.mode", "0 for graph mode, 1 for PyNative mode"),
    "device_id": Flag(int, "context.device_id", "device to run on"),
    "device_target": Flag(str, "context.device_target", "Ascend or CPU"),
    "do_eval": Flag(true_or_false, "do_eval", "evaluate while training"),
    "seed": Flag(int, "seed", "random seed"),
    "use_parallel": Flag(true_or_false, "use_parallel", "run on several devices, under msrun"),
    "load_checkpoint": Flag(str, "load_checkpoint", "checkpoint of the base: a file or a folder"),
    "src_strategy_path_or_dir": Flag(
        str, "src_strategy_path_or_dir", "parallel strategy of load_checkpoint: a file or a folder"
    ),
    "auto_trans_ckpt": Flag(
        true_or_false, "auto_trans_ckpt", "transform load_checkpoint to the parallel layout of this run"
    ),
    "transform_process_num": Flag(int, "transform_process_num", "number of processes that transform the checkpoint"),
    "only_save_strategy": Flag(true_or_false, "only_save_strategy", "save the parallel strategy and stop"),
    "resume_training": Flag(
        true_false_or_name,
        "resume_training",
        "resume from a complete checkpoint of CheckpointMonitor; what LoraCheckpoint saved is resumed with --resume",
    ),
    "remote_save_url": Flag(str, "remote_save_url", "URL to copy the output to"),
    "profile": Flag(true_or_false, "profile", "profile the run"),
    "train_dataset_dir": Flag(
        str, "train_dataset.data_loader.dataset_dir", "training data: a MindRecord, or a folder of them"
    ),
    "eval_dataset_dir": Flag(
        str, "eval_dataset.data_loader.dataset_dir", "evaluation data: a MindRecord, or a folder of them"
    ),
    "do_sample": Flag(true_or_false, "model.model_config.do_sample", "predict by sampling"),
    "epochs": Flag(int, "runner_config.epochs", "number of epochs"),
    "batch_size": Flag(int, "runner_config.batch_size", "rows in a batch on each device"),
    "gradient_accumulation_steps": Flag(
        int, "runner_config.gradient_accumulation_steps", "batches whose gradients are added up before an update"
    ),
    "sink_mode": Flag(
        true_or_false, "runner_config.sink_mode", "data sinking: feed several steps to the device at once"
    ),
    "output_dir": Flag(str, "output_dir", "folder to write to"),
    "trust_remote_code": Flag(true_or_false, "trust_remote_code", "allow a Hugging Face tokenizer to run its own code"),
    "predict_batch_size": Flag(int, "predict_batch_size", "texts in a batch when predicting"),
}

# Nodes of a YAML whose keys MindFormers all knows and fills in, so that no other key may be set in them; the keys
# of "" are those beside the nodes.
CLOSED_NODES: Dict[str, Tuple[str, ...]] = {
    "": (
        *("seed", "output_dir", "run_mode", "use_parallel", "resume_training", "print_separate_loss"),
        *("load_checkpoint", "load_ckpt_format", "auto_trans_ckpt", "transform_process_num"),
        *("src_strategy_path_or_dir", "only_save_strategy", "load_ckpt_async", "use_legacy", "use_legacy_format"),
        *("pretrained_model_dir", "balanced_load", "reshard_worker_num", "do_eval", "eval_step_interval"),
        *("eval_epoch_interval", "ignore_data_skip", "data_skip_steps", "profile", "profile_communication"),
        *("profile_memory", "init_start_profile", "profile_start_step", "profile_stop_step", "profile_rank_ids"),
        *("profile_pipeline", "profile_level", "mstx", "layer_scale", "layer_decay", "lr_scale", "lr_scale_factor"),
        *("micro_batch_interleave_num", "remote_save_url", "save_file", "input_data", "predict_batch_size"),
        *("adapter_id", "exclude_cann_cpu", "train_precision_sync", "infer_precision_sync"),
        "postprocess_use_numpy",
    ),
    "runner_config": (
        *("batch_size", "epochs", "sink_mode", "sink_size", "gradient_accumulation_steps", "num_classes"),
        "stop_step",
    ),
    "parallel_config": (
        *("data_parallel", "model_parallel", "context_parallel", "expert_parallel", "pipeline_stage"),
        *("micro_batch_num", "seq_split_num", "use_seq_parallel", "optimizer_shard", "gradient_aggregation_group"),
        *("vocab_emb_dp", "context_parallel_algo", "ulysses_degree_in_cp", "mem_coeff"),
    ),
    "moe_config": (
        *("expert_num", "capacity_factor", "aux_loss_factor", "num_experts_chosen", "expert_group_size"),
        *("group_wise_a2a", "comp_comm_parallel", "comp_comm_parallel_degree", "save_token_distribution"),
        *("cur_layer", "enable_cold_hot_expert", "update_step", "hot_expert_num", "cold_token_percent"),
        *("moe_module_name", "routing_policy", "norm_topk_prob", "enable_sdrop", "use_fused_ops_topkrouter"),
        *("router_dense_type", "shared_expert_num", "use_shared_expert_gating", "max_router_load", "topk_method"),
        *("topk_group", "n_group", "first_k_dense_replace", "moe_intermediate_size", "routed_scaling_factor"),
        *("aux_loss_types", "aux_loss_factors", "z_loss_factor", "balance_via_topk_bias", "topk_bias_update_rate"),
        *("use_allgather_dispatcher", "moe_shared_expert_overlap", "expert_model_parallel", "use_gating_sigmoid"),
        *("enable_deredundency", "npu_nums_per_device", "use_gmm", "enable_gmm_safe_tokens"),
        *("use_fused_ops_permute", "callback_moe_droprate", "dispatch_global_max_bs", "ep_extend_tp"),
    ),
    "recompute_config": (
        *("recompute", "select_recompute", "parallel_optimizer_comm_recompute", "select_comm_recompute"),
        *("mp_comm_recompute", "recompute_slice_activation", "select_recompute_exclude"),
        "select_comm_recompute_exclude",
    ),
    "swap_config": ("swap", "layer_swap", "op_swap", "default_prefetch"),
}
# Nodes that MindFormers creates where a YAML lacks them, in every run mode and in training, and pet_config.
_NODES = ("runner_config", "context", "parallel", "trainer", "model", "moe_config", "parallel_config")
_TRAINING_NODES = (
    *("recompute_config", "swap_config", "runner_wrapper", "optimizer", "lr_schedule", "metric", "train_dataset"),
    *("train_dataset_task", "monitor_config"),
)


def apply_overrides(config: Dict[str, Any], words: Sequence[str]) -> None:
    """Applies a command line to the content of a YAML, in place: first the flags, then the dotted keys.

    The words are ``--a.b.c VALUE``, ``--a.b.c=VALUE``, or a flag of mindlora-run with its value. Raises ConfigError if
    they are not, a flag cannot take its value, or there is no such key.
    """
    pairs = list(keys_and_texts(words))
    config.update({name: text for name, text in pairs if name == "run_mode"})
    set_flags(config, {name: _flag_value(name, text) for name, text in pairs if name in FLAGS})
    set_keys(config, [(key, text) for key, text in pairs if key not in (*FLAGS, "run_mode")])


def set_flags(config: Dict[str, Any], values: Mapping[str, Any]) -> None:
    """Sets the keys of flags in the content of a YAML, in place; keys that ``values`` lacks or maps to None stay."""
    for name, flag in FLAGS.items():
        if values.get(name) is not None:
            set_key(config, flag.key, values[name], f"--{name}", create=True)


def set_keys(config: Dict[str, Any], pairs: Iterable[Tuple[str, str]]) -> None:
    """Sets (dotted key, text of the value) in the content of a YAML, in place."""
    for key, text in pairs:
        set_key(config, key, read_value(text), f"--{key}")


def keys_and_texts(words: Sequence[str]) -> Iterator[Tuple[str, str]]:
    """Yields (dotted key or flag, text) from ``--a.b.c VALUE`` and ``--a.b.c=VALUE``."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise ConfigError(f"Expected a key that starts with --, but got {word!r}: quote a value that has spaces.")
        key, separator, text = word[2:].partition("=")
        if not separator:
            if not rest:
                raise ConfigError(f"--{key} has no value. Write --{key} VALUE.")
            text = rest.pop(0)
        yield _flag_name(key), text


def split_overrides(words: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Splits the words that no option took into those that override the YAML and the others."""
    overrides: List[str] = []
    others: List[str] = []
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            side = overrides if _is_key(name) else others
            side.append(word)
        elif overrides and overrides[-1].startswith("--") and "=" not in overrides[-1]:
            overrides.append(word)
        else:
            others.append(word)
    return overrides, others


def _flag_name(option: str) -> str:
    """Returns the name of the flag that an option sets, with dashes allowed for underscores, or the option itself."""
    name = option.replace("-", "_")
    return name if name in FLAGS else option


def _is_key(option: str) -> bool:
    """Returns whether an option names a key of a YAML, or a flag that sets one."""
    name = _flag_name(option)
    return "." in name or name in FLAGS or name in (*CLOSED_NODES[""], *_NODES, *_TRAINING_NODES, "callbacks")


def read_value(text: str) -> Any:
    """Returns the value that a text of the command line stands for, as MindFormers' parse_value reads it.

    The value is an integer, a number, True or False, or JSON. Beyond MindFormers, it may be a list in brackets or a
    node in braces in YAML's flow style, such as ``{loss: dpo}``. Any other text is a string.
    """
    if text in ("True", "False"):
        return text == "True"
    for read in (int, float, json.loads):
        try:
            return read(text)
        except ValueError:
            continue
    return _flow_value(text)


def _flow_value(text: str) -> Any:
    """Returns the list or node that a text in YAML's flow style stands for, or else the text."""
    if not text.strip().startswith(("[", "{")):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    # In YAML, a template such as "{instruction}" is a node with a key and no value.
    is_template = isinstance(value, dict) and None in value.values()
    return text if is_template or not isinstance(value, (list, dict)) else value


def set_key(
    config: Dict[str, Any],
    key: str,
    value: Any,
    source: str,
    create: bool = False,
    nodes: Optional[Sequence[str]] = None,
) -> None:
    """Sets the value at a dotted key, whose parents must exist; raises ConfigError if there is no such key.

    An item of a list is named by its number, counted from 0, or by its ``type``. A value with keys becomes a node like
    its parent: MindFormers reads nodes of its own configurations by attribute.

    Args:
        config (dict): The content of a YAML, or MindFormers' configuration of it; it is changed in place.
        key (str): The dotted key.
        value: The new value.
        source (str): The option that gave the key, for messages.
        create (bool): Whether a key that MindFormers does not know may be created.
        nodes (sequence of str): Nodes that are created where the YAML lacks them. Default: those of graph mode.
    """
    *parents, leaf = key.split(".")
    made = _nodes_made(config) if nodes is None else nodes
    node: Any = config
    for depth, name in enumerate(parents):
        where = ".".join(parents[:depth]) or "the YAML"
        if isinstance(node, list):
            node = _item(node, name, where, source)
            continue
        if isinstance(node, dict) and node.get(name) is None and ".".join(parents[: depth + 1]) in made:
            node[name] = type(node)()
        node = _child(node, name, where, source)
    parent = ".".join(parents)
    if not isinstance(node, dict):
        raise ConfigError(f"{source}: {parent} is {shown(node)} and has no keys. Name a node that has.")
    if not create and key not in made:
        _check_leaf(node, parent, leaf, source)
    if not create:
        for name in value if isinstance(value, dict) else ():
            _check_leaf({}, key, name, source)
    node[leaf] = _as_node(value, type(node))


def _check_leaf(node: Mapping[str, Any], parent: str, leaf: str, source: str) -> None:
    """Raises ConfigError if all keys of the node at ``parent`` are known, and ``leaf`` is none of them."""
    keys = {*node, *CLOSED_NODES.get(parent, ())}
    if parent in CLOSED_NODES and leaf not in keys:
        where = parent or "the YAML"
        # Whoever writes a key without a dot may have meant a flag, such as --epochs.
        names = sorted(keys if parent else {*keys, *FLAGS})
        raise ConfigError(f"{source}: '{leaf}' is not a key of {where}.{suggestion(leaf, names)}")


def _as_node(value: Any, kind: Type[Dict[str, Any]]) -> Any:
    """Returns a node and the nodes below it as dictionaries of one class; items of a list stay as they are.

    MindFormers builds its configuration of a YAML in this way.
    """
    if not isinstance(value, dict) or kind is dict:
        return value
    node = kind()
    for name, item in value.items():
        node[name] = _as_node(item, kind)
    return node


def _nodes_made(config: Dict[str, Any]) -> Tuple[str, ...]:
    nodes = (*_NODES, PET)
    return (*nodes, *_TRAINING_NODES) if config.get("run_mode") in TRAINING_MODES else nodes


def _child(node: Any, name: str, where: str, source: str) -> Any:
    if not isinstance(node, dict) or node.get(name) is None:
        keys = ", ".join(sorted(map(str, node))) if isinstance(node, dict) else "nothing"
        advice = f"Write --{PET}." if name == PET.rpartition(".")[2] else "Correct the key."
        raise ConfigError(f"{source}: '{name}' is not a key of {where}, which has: {keys}. {advice}")
    return node[name]


def _item(items: List[Any], name: str, where: str, source: str) -> Any:
    """Returns the item of a list with this number or ``type``."""
    types = [item.get("type") if isinstance(item, dict) else item for item in items]
    if name.isdigit():
        if int(name) < len(items):
            return items[int(name)]
    elif types.count(name) == 1:
        return items[types.index(name)]
    elif name in types:
        numbers = [str(number) for number, kind in enumerate(types) if kind == name]
        raise ConfigError(f"{source}: {where} has {name} at {' and '.join(numbers)}: name one by its number.")
    listed = ", ".join(f"{number} {kind}" for number, kind in enumerate(types)) or "nothing"
    raise ConfigError(f"{source}: '{name}' is not an item of {where}, which has: {listed}. Choose one of these.")


def _flag_value(name: str, text: str) -> Any:
    kind = FLAGS[name].kind
    try:
        return kind(text)
    except ValueError as error:
        must_be = "a whole number" if kind is int else "True or False"
        raise ConfigError(f"--{name} is {text!r}, but it must be {must_be}.") from error
