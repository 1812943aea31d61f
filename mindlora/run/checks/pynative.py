"""Checks of a YAML for MindFormers 2's PyNative trainer (run_mindformer.py --mode 1) that the trainer does not make.

Its nodes differ from graph mode's: lora_config at the top, and a model without model_config.
"""

import itertools
import math
import re
from typing import Any, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT
from mindlora.core.numerics import initializers
from mindlora.core.text import examples, shown, suggestion
from mindlora.core.yaml_file import value_at
from mindlora.files.adapters.adapter import ALPHA
from mindlora.models.architectures import registry
from mindlora.models.architectures.architecture import Architecture
from mindlora.models.description import Description
from mindlora.run.checks.batches import rows_up_to
from mindlora.run.checks.data_rows import FirstRows, check_pynative_labels
from mindlora.run.checks.files import check_path
from mindlora.run.checks.finding import Finding, error, errors, note, warning
from mindlora.run.checks.model import network_of as described
from mindlora.run.checks.pynative_adapter import check_adapter, check_graph_mode
from mindlora.run.checks.pynative_checkpoint import check_checkpoint
from mindlora.run.yaml_run import YamlRun, data_of
from mindlora.training.classifier.rules import check_pynative_classifier
from mindlora.training.preference.rules import check_pynative_preference
from mindlora.training.rl.rules import check_pynative_rl
from mindlora.training.several.rules import check_of_each, check_pynative_adapters
from mindlora.training.trackers.rules import check_pynative_trackers

# The cells on which the PyNative trainer puts LoRA: its search for target_modules, and MindFormers 2.0's additions.

# The cells of a layer in the order in which the trainer builds them, if that differs from their record's.
_BUILT_FIRST = ("linear_proj", "linear_qb", "linear_qkv")
_HOLDER = "model."
_EXPERTS = ".mlp.experts"


class Selection(NamedTuple):
    """The paths of the cells that get LoRA, as in the names of parameters.

    Attributes:
        cells (list of str): The cells that target_modules selects.
        leaked (list of str): Further cells that MindFormers 2.0 adapts. Once a cell matches, it looks for the siblings
            behind it under the path of that cell, which then contains the pattern.
        missed (list of str): Cells that MindFormers 2.0 does not adapt, since only their own path matches the pattern.
    """

    cells: List[str]
    leaked: List[str]
    missed: List[str]

    @property
    def in_2_0(self) -> List[str]:
        """The cells that MindFormers 2.0 adapts."""
        return [path for path in (*self.cells, *self.leaked) if path not in self.missed]


def architecture_of(model: Mapping[str, Any]) -> Optional[Architecture]:
    """Returns the record of the model in the node ``model`` of a YAML, or None if it is unknown."""
    classes = model.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else classes
    found = registry.by_model_type(str(name))
    found = found or registry.by_hugging_face_type(str(model.get("model_type")))
    return found if found and not found.legacy else None


def network_of(model: Mapping[str, Any]) -> Optional[Description]:
    """Returns the description of that model, or None if it is unknown or its sizes cannot be determined."""
    architecture = architecture_of(model)
    try:
        return described(architecture, dict(model)) if architecture else None
    except ConfigError:
        return None


def adaptable_cells(network: Description) -> List[str]:
    """Returns the paths of the linear cells and of the experts of a model, in the order in which they are built."""
    return sorted(dict.fromkeys(map(_cell_of, network.cells)), key=_place_in_parent)


def select(paths: Iterable[str], target: str, exclude: Optional[str] = None) -> Selection:
    """Returns, in order, the cells at ``paths`` on which LoRA is put.

    Args:
        paths (iterable of str): The result of adaptable_cells.
        target (str): target_modules, searched in "model." and the path.
        exclude (str): exclude_layers. Default: None.
    """
    tree: Dict[str, Any] = {}
    for path in paths:
        node = tree
        for part in (_HOLDER + path).split("."):
            node = node.setdefault(part, {})
    search = _Search(re.compile(target), re.compile(exclude) if exclude else None, leaks=False)
    right = [path.removeprefix(_HOLDER) for path in search.cells(tree)]
    in_2_0 = [path.removeprefix(_HOLDER) for path in search._replace(leaks=True).cells(tree)]
    # MindFormers 2.0 puts no LoRA on experts.
    leaked = [path for path in in_2_0 if path not in right and not path.endswith(_EXPERTS)]
    missed = [path for path in right if path not in in_2_0 or path.endswith(_EXPERTS)]
    return Selection(right, leaked, missed)


def selected_paths(network: Optional[Description], lora: Mapping[str, Any]) -> List[str]:
    """Returns the paths, in the model, of the cells and weights of experts that a lora_config selects with mindlora.

    They are empty if the model is unknown.
    """
    if network is None:
        return []
    chosen = set(select(adaptable_cells(network), lora["target_modules"], lora.get("exclude_layers")).cells)
    return [path for path in network.cells if _cell_of(path) in chosen]


def _cell_of(path: str) -> str:
    """Returns the path of a cell, or of a weight of experts, in which target_modules is searched for."""
    return re.sub(r"\.weight[12]$", "", path.removeprefix(_HOLDER))


class _Search(NamedTuple):
    target: "re.Pattern[str]"
    exclude: Optional["re.Pattern[str]"]
    leaks: bool

    def cells(self, tree: Dict[str, Any], path: str = "", searched: str = "") -> List[str]:
        """Returns the paths of the cells below ``tree``, which is at ``path`` and searched as ``searched``."""
        found: List[str] = []
        for name, children in tree.items():
            below = f"{path}.{name}" if path else name
            text = f"{searched}.{name}" if searched else name
            if self.exclude and self.exclude.search(text):
                continue
            if children:
                found += self.cells(children, below, text)
            elif self.target.search(text):
                found.append(below)
                if self.leaks:
                    # It mistakes the name of the parameter for the parent path of its siblings.
                    searched = below[len(_HOLDER) :]
        return found


def _place_in_parent(path: str) -> int:
    leaf = path.rpartition(".")[2]
    return _BUILT_FIRST.index(leaf) if leaf in _BUILT_FIRST else len(_BUILT_FIRST)


# The first two numbers of MindFormers' version.
Version = Optional[Tuple[int, int]]
LORA_KEYS = (
    *("target_modules", "exclude_layers", "lora_rank", "lora_alpha", "lora_dropout"),
    *("lora_a_std", "lora_b_std"),
)
# Keys of pet_config with which MindFormers' save_trainable_only cannot be combined -> why.
_OTHER_SCALE = "states the scale of the adapter as lora_alpha / lora_rank"
_NOT_ALONE = {
    **dict.fromkeys(("use_rslora", "rank_pattern", "alpha_pattern"), _OTHER_SCALE),
    "lora_init": "leaves out the base, which lora_init changes",
    "alora_invocation_tokens": "does not say from which tokens on the adapter acts",
    "adapters": "saves one adapter, as lora_config describes it",
    "use_adalora": "leaves out the importance of ranks",
    "modules_to_save": "saves A and B alone",
    "freeze_exclude": "saves A and B alone",
}
_NEW_KEYS = ("save_trainable_only", "base_load_path", "reshard_worker_num")
# Nodes that the Trainer, or mindlora, fills in where a YAML lacks them.
NODES = (
    *("checkpoint", "training", "parallelism", "optimizer", "lr_scheduler", "train_dataset", "model", "monitor"),
    *("context", "profiler", "recompute", "recompute_comm", "swap", "lora_config", "pet_config", "preference", "rl"),
)
# The name in auto_register that loads mindlora.
BRIDGE = "pynative_bridge.Adapters"
# Defaults of lora_config.lora_rank and lora_alpha.
DEFAULT_RANK, DEFAULT_ALPHA = 8, 16


def is_pynative(config: Mapping[str, Any]) -> bool:
    """Returns whether a YAML is for the PyNative trainer rather than for graph mode."""
    model = config.get("model")
    typed = isinstance(model, Mapping) and "model_config" not in model and "arch" not in model
    return "lora_config" in config or "training" in config and typed


def check_pynative(
    config: Mapping[str, Any], version: Version = None, first_rows: Optional[FirstRows] = None
) -> List[Finding]:
    """Returns faults in a YAML of the PyNative trainer, and facts worth knowing.

    Args:
        config (mapping): The content of the YAML.
        version (tuple of int): Version of the MindFormers that will run it, such as (2, 0). Default: None, unknown.
        first_rows (callable, optional): Reads the first rows of a MindRecord. Default: None, no row is read.
    """
    misshapen = list(_check_shape(config))
    if misshapen:
        return misshapen
    findings = [*_check_checkpoint_keys(config, version), *_check_rows(config)]
    findings += [*check_graph_mode(config), *check_pynative_classifier(config), *check_pynative_trackers(config)]
    findings += check_pynative_preference(config, first_rows)
    if first_rows is not None:
        findings += check_pynative_labels(config, first_rows)
    lora = config.get("lora_config")
    if lora is None:
        return findings
    findings += _check_lora(lora)
    if errors(findings):
        return findings
    selected: Optional[List[str]] = None
    network = network_of(config.get("model") or {})
    # mindlora puts its cells where lora_config says, and MindFormers 2.0 then adapts no further cells.
    with_mindlora = (config.get("model") or {}).get("auto_register") == BRIDGE
    searched_by = (2, 1) if with_mindlora else version
    if network:
        paths = adaptable_cells(network)
        findings += _check_targets(lora, paths, searched_by)
        selection = select(paths, lora["target_modules"], lora.get("exclude_layers"))
        cells = selection.in_2_0 if searched_by == (2, 0) else selection.cells
        selected = cells or None
    findings += check_pynative_adapters(config)
    findings += check_pynative_rl(config)
    paths, count = selected_paths(network, lora), len(selected or ())
    findings += check_of_each(config, lambda alone: check_adapter(alone, paths, count))
    findings += _check_decay(config)
    findings += _check_adapter_alone(config)
    findings += check_path(YamlRun(config), "pet_config.adapter_path")
    return [*findings, *check_checkpoint(config, network, selected, version)]


def processes_of_a_model(parallelism: Mapping[str, Any], processes: int) -> int:
    """Returns the number of processes among which MindFormers divides a model; 1 if each has all of it.

    Args:
        parallelism (mapping): The node of the YAML.
        processes (int): Number of training processes.
    """
    dividing = math.prod(parallelism.get(f"{kind}_parallel") or 1 for kind in ("tensor", "pipeline", "context"))
    replicas = processes // dividing
    sharding = parallelism.get("data_parallel_shard", -1)
    # Rounded as MindFormers does.
    copies = 1 if sharding < 0 else max(replicas // max(sharding, 1), 1)
    return processes // copies


def check_weights(divided: int, parts: int) -> Iterator[Finding]:
    """Yields a warning if the parts of a step count equally regardless of their tokens.

    Args:
        divided (int): Number of processes among which the model is divided.
        parts (int): Batches in a step: micro-batches times data-parallel ranks.
    """
    if divided > 1 and parts > 1:
        yield warning(
            "training.global_batch_size",
            f"A step has {parts} parts, which MindFormers weighs alike: a token counts more in a part that has fewer "
            "of them in the loss. mindlora weighs parts by their tokens where each process has the whole model, and "
            f"here {divided} processes divide it.",
            "Set parallelism.data_parallel_shard: 1 if the model fits, or pack the rows, so that all parts have about "
            "as many tokens.",
        )


def _check_adapter_alone(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields why MindFormers' adapter checkpoints (save_trainable_only) would not hold the complete adapter."""
    pet_config = config.get("pet_config") or {}
    if not (config.get("checkpoint") or {}).get("save_trainable_only"):
        return
    for key, reason in _NOT_ALONE.items():
        value = pet_config.get(key)
        combined = initializers.changes_base(str(value)) if key == "lora_init" else value
        if combined:
            yield error(
                f"pet_config.{key}",
                f"{key} is {shown(value)}, and save_trainable_only {reason}.",
                "Remove save_trainable_only. LoraCheckpoint saves the adapter alone and whole.",
            )


def _check_shape(config: Mapping[str, Any]) -> Iterator[Finding]:
    for key in ("model", "checkpoint", "optimizer", "lora_config", "pet_config"):
        if config.get(key) is not None and not isinstance(config[key], Mapping):
            yield error(key, f"{key} is {shown(config[key])}; it must be a mapping of keys to values.")


def _check_rows(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error if the data has too few rows for a micro-batch, so that the trainer would have no steps."""
    data = data_of({"data_loader": value_at(config, "train_dataset.dataloader")})
    batch = value_at(config, "training.local_batch_size")
    if data is None or batch not in COUNT or value_at(config, "train_dataset.drop_remainder") is False:
        return
    rows = rows_up_to(batch, data)
    if rows < batch:
        yield error(
            "train_dataset",
            f"train_dataset has {rows} rows, but a micro-batch needs {batch} (training.local_batch_size).",
            "Lower local_batch_size, or give more data.",
        )


def _check_lora(lora: Mapping[str, Any]) -> Iterator[Finding]:
    for key in lora:
        if key not in LORA_KEYS:
            found = f"lora_config.{key} is not known to the trainer, which ends with an error."
            yield error(f"lora_config.{key}", found, f"Remove it.{suggestion(str(key), list(LORA_KEYS))}")
    if lora.get("lora_rank", DEFAULT_RANK) not in COUNT:
        found = f"lora_rank is {shown(lora['lora_rank'])}; it must be {COUNT.words}."
        yield error("lora_config.lora_rank", found)
    alpha = lora.get("lora_alpha", DEFAULT_ALPHA)
    if alpha not in ALPHA or not isinstance(alpha, int):
        yield error(
            "lora_config.lora_alpha",
            f"lora_alpha is {shown(alpha)}; the trainer takes a whole number above 0, and it must be one.",
        )
    for key in ("target_modules", "exclude_layers"):
        yield from _check_pattern(lora.get(key), key)


def _check_pattern(pattern: Any, key: str) -> Iterator[Finding]:
    if pattern is None and key == "exclude_layers":
        return
    if not isinstance(pattern, str) or not pattern.strip():
        found = f"{key} is {shown(pattern)}; it must be one regular expression."
        yield error(f"lora_config.{key}", found, "Join several names with |, such as linear_qkv$|linear_proj$.")
        return
    try:
        re.compile(pattern)
    except re.error as problem:
        yield error(f"lora_config.{key}", f"{key} {pattern!r} is not a regular expression: {problem}.", "Correct it.")


def _check_targets(lora: Mapping[str, Any], paths: List[str], version: Version) -> Iterator[Finding]:
    key = "lora_config.target_modules"
    target, exclude = lora["target_modules"], lora.get("exclude_layers")
    cells, leaked, missed = select(paths, target, exclude)
    if not cells:
        begins = " Paths begin with model.decoder, so ^decoder matches none." if target.startswith("^") else ""
        known = examples(f"model.{path}" for path in paths)
        yield error(key, f"target_modules {target!r} matches no cell.{begins}", f"Name some of {known}.")
    if exclude and not any(re.search(exclude, f"model.{path}") for path in paths):
        yield warning("lora_config.exclude_layers", f"exclude_layers {exclude!r} matches no cell.", "Correct it.")
    if leaked and version in (None, (2, 0)):
        yield warning(
            key,
            f"MindFormers 2.0 adapts {examples(leaked)} too: it looks for the siblings after a cell that matches under "
            "that cell's path.",
            "End each name in target_modules with $, such as linear_fc1$, or use MindFormers 2.1.",
        )
    siblings = [path for path in missed if not path.endswith(".experts")]
    if siblings and version in (None, (2, 0)):
        yield warning(
            key,
            f"MindFormers 2.0 leaves {examples(siblings)} out: it looks for the siblings after a cell that matches "
            "under that cell's path, where the pattern does not hold.",
            "Name the cells without what comes before them, such as linear_qkv$, or use MindFormers 2.1.",
        )
    experts = [path for path in missed if path.endswith(".experts")]
    if experts and version == (2, 0):
        found = f"MindFormers 2.0 puts no LoRA on routed experts: {examples(experts)} get none."
        yield warning(key, found, "Use MindFormers 2.1, or leave them out.")


def _check_decay(config: Mapping[str, Any]) -> Iterator[Finding]:
    optimizer: Dict[str, Any] = dict(config.get("optimizer") or {})
    decay = optimizer.get("weight_decay", 0.01)
    rules = optimizer.get("weight_decay_exclude") or []
    rules = [rules] if isinstance(rules, str) else rules
    if not decay or any("lora" in str(rule) for rule in rules):
        return
    found = f"weight_decay {decay} pulls A and B to zero too"
    action = "Set weight_decay: 0.0, or weight_decay_exclude: ['lora_a', 'lora_b'], if that is not meant."
    if "weight_decay" in optimizer:
        yield note("optimizer.weight_decay", f"{found}.", action)
    else:
        yield warning("optimizer.weight_decay", f"{found} (the default of the trainer).", action)


def _check_checkpoint_keys(config: Mapping[str, Any], version: Version) -> Iterator[Finding]:
    checkpoint = config.get("checkpoint") or {}
    for key in itertools.compress(_NEW_KEYS, (key in checkpoint for key in _NEW_KEYS)):
        if version == (2, 0):
            found = f"checkpoint.{key} is a key of MindFormers 2.1, and 2.0 ends with an error."
            yield error(f"checkpoint.{key}", found, "Remove it, or use MindFormers 2.1.")
