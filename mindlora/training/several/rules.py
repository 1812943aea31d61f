"""pet_config.adapters: several adapters that train in one run, and what they require of the rest of the YAML."""

import copy
import dataclasses
import os
import re
import warnings
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.fields import NOT_NEGATIVE, check_number
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.core.numerics.initializers import changes_base, freezes_b
from mindlora.core.text import listed, shown, suggestion
from mindlora.core.yaml_file import PET, value_at
from mindlora.models.variants.registry import LORA
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative_adapter import merged
from mindlora.run.checks.targets import check_targets
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import WRAPPER, YamlRun

KEY = f"{PET}.adapters"
# The mcore models on which several adapters train.
_MCORE = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
OPTIMIZER = "AdamW"
# Keys of pet_config in which adapters may differ, in addition to name, learning_rate, data and rl.
_DIFFER = (
    *("lora_rank", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform"),
    *("lora_init", "lora_a_init", "lora_b_init", "seed"),
)
OWN_KEYS = ("name", "learning_rate", "data", "rl", *_DIFFER)
# Other keys that users might want to differ, and why they cannot.
_SHARED = {
    "quantize_base": "all adapters of a run share one base in memory, in one form",
    "quantize_exclude": "all adapters of a run share one base in memory, in one form",
    "load_checkpoint": "all adapters of a run share one base in memory",
    "param_init_type": "the A of all adapters are one parameter, and so are the B",
    "compute_dtype": "the products of all adapters are computed at once",
    "lora_dropout": "the inputs of all adapters are dropped out at once",
}
# Fields of pet_config that a run with several adapters does not support.
_NOT_WITH_OTHERS = (
    *("freeze_lora_a", "modules_to_save", "freeze_include", "freeze_exclude"),
    *("adapter_path", "loraplus_lr_ratio", "neftune_alpha", "alora_invocation_tokens"),
)
# Callbacks of the complete run, and those of which each adapter has its own.
OF_RUN = ("MFLossMonitor", "ProgressBar", "GracefulStop")
_OF_ADAPTER = (
    *("EmptySteps", "HeldOutLoss", "TrainingGuard", "WarmUp", "ReduceOnPlateau", "GradientNormRate", "EarlyStopping"),
    *("LoraCheckpoint", "RunReport", "Trackers"),
)
_WITH_OTHERS = (*OF_RUN, *_OF_ADAPTER)
# Includes RunReport's former name, which the next version drops, and a callback of runs with rl.
OF_ADAPTER = (*_OF_ADAPTER, "LossCurve", "RlReport")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]*")
# Temporary names beside a folder are longer than its own, and file systems take 255 bytes.
_LONGEST_NAME = 100
# Other names in the run's folder, in which each adapter has a folder of its name; compared without case.
_TAKEN_NAMES = ("adapters.json", "comparison.json", "comparison.html", "checkpoint", "log", "strategy")
# Keys of nodes that a run with several adapters reads.
_KNOWN_KEYS = {
    "runner_wrapper": ("type", "scale_sense", "use_clip_grad", "max_grad_norm", "loss_in_pieces", "rl"),
    "optimizer": ("type", "betas", "eps", "weight_decay"),
}


# Arguments of callbacks that name the folder they write to -> what they write to in the folder of an adapter.
_WRITING = {"LoraCheckpoint": "lora_checkpoint", "LossCurve": "", "RunReport": ""}


@dataclasses.dataclass(frozen=True)
class TrainedAdapter:
    """One adapter in a run with several.

    Attributes:
        name (str): The name of the adapter and of its folder.
        config (PetLoraConfig): pet_config, with the adapter's own settings.
        learning_rate (float or None): Replaces lr_schedule.learning_rate; None keeps it.
        data (str or None): A MindRecord, or a folder of them, instead of train_dataset's; None keeps that.
        own (dict): The adapter's own keys of pet_config.
        rl (dict): The adapter's own keys of runner_wrapper.rl.
    """

    name: str
    config: PetLoraConfig
    learning_rate: Optional[float]
    data: Optional[str]
    own: Dict[str, Any]
    rl: Dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def settings(self) -> Dict[str, Any]:
        """The adapter's own settings, except the name."""
        beside = {"learning_rate": self.learning_rate, "data": self.data, "rl": self.rl or None}
        return {**self.own, **{key: value for key, value in beside.items() if value is not None}}


def trained_adapters(pet_config: PetLoraConfig) -> List[TrainedAdapter]:
    """Returns the adapters that pet_config.adapters describes.

    Raises:
        ConfigError: A key of an adapter is unknown, out of range or one in which adapters cannot differ, or two
            adapters have one name.
    """
    nodes = pet_config.adapters
    if not isinstance(nodes, (list, tuple)) or not nodes or not all(isinstance(node, Mapping) for node in nodes):
        raise ConfigError(
            "adapters must be a list of nodes, one for each adapter, such as '- {name: small, lora_rank: 8}'."
        )
    adapters = [_adapter(pet_config, dict(node), number) for number, node in enumerate(nodes, 1)]
    # Some file systems do not distinguish names that differ only in case.
    names = [adapter.name.lower() for adapter in adapters]
    twice = sorted({adapter.name for adapter in adapters if names.count(adapter.name.lower()) > 1})
    if twice:
        raise ConfigError(f"adapters has the name {twice[0]!r} twice: each adapter has a folder of that name.")
    return adapters


def _adapter(pet_config: PetLoraConfig, node: Dict[str, Any], number: int) -> TrainedAdapter:
    where = f"adapters[{number - 1}]"
    for key in node:
        if key in _SHARED:
            raise ConfigError(f"{where} has {key}, in which adapters cannot differ: {_SHARED[key]}. Use two runs.")
        if key not in OWN_KEYS:
            raise ConfigError(
                f"{where} has the key {key!r}, in which adapters cannot differ.{suggestion(str(key), list(OWN_KEYS))}"
            )
    name = node.pop("name", f"adapter_{number}")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: name is {name!r}, but it must be the name of a folder: letters, digits and . _ = + - only."
        )
    if len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"{where}: name has {len(name)} characters, and a folder is called like it: choose one of "
            f"{_LONGEST_NAME} at most."
        )
    if name.lower() in _TAKEN_NAMES:
        raise ConfigError(f"{where}: name is {name!r}, which the run writes beside the adapters. Choose another one.")
    rate = node.pop("learning_rate", None)
    if rate is not None:
        check_number(rate, f"{where}: learning_rate", NOT_NEGATIVE)
    data = node.pop("data", None)
    if data is not None and not isinstance(data, str):
        raise ConfigError(f"{where}: data is {data!r}, but it must be the path of a MindRecord, or of a folder.")
    rl = node.pop("rl", None) or {}
    if not isinstance(rl, Mapping):
        raise ConfigError(f"{where}: rl is {rl!r}, but it must be a node with keys of runner_wrapper.rl.")
    try:
        config = dataclasses.replace(pet_config, adapters=None, **node)
        return TrainedAdapter(name, config, rate, data, node, dict(rl))
    except LoraError as refusal:
        raise ConfigError(f"{where}: {refusal}") from refusal


def rl_of(node: Mapping[str, Any], adapter: TrainedAdapter) -> Dict[str, Any]:
    """Returns the node runner_wrapper.rl of a run with only this adapter, from the node of the run with all."""
    return {**node, **adapter.rl}


def write_to_own_folder(callbacks: List[Dict[str, Any]], name: str, output: str) -> None:
    """Makes callbacks write to a folder of the adapter's name, in their own folder or in the run's output folder.

    Trackers get the adapter's name too.
    """
    for callback in callbacks:
        if callback["type"] == "Trackers":
            callback["adapter"] = name
        if callback["type"] in _WRITING:
            folder = callback.get("directory") or output
            callback["directory"] = os.path.join(folder, name, _WRITING[callback["type"]])


def check_cells(run: YamlRun, pet_config: PetLoraConfig) -> List[Finding]:
    """Returns the findings of check_targets for pet_config, or for each of its adapters.

    A finding about all adapters is listed once; any other begins with the names of its adapters.
    """
    if not pet_config.adapters:
        return check_targets(run, pet_config.for_network())
    # Warnings about shared values have been issued for pet_config.
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        try:
            adapters = trained_adapters(pet_config)
        except ConfigError:
            # check_adapters reports the error.
            return []
    return by_adapter({each.name: check_targets(run, each.config.for_network()) for each in adapters})


def by_adapter(found: Mapping[str, List[Finding]]) -> List[Finding]:
    """Merges the findings by adapter name as in check_cells; a single adapter's findings stay unchanged."""
    names_by_finding: Dict[Finding, List[str]] = {}
    for name, findings_of_one in found.items():
        for finding in findings_of_one:
            names_by_finding.setdefault(finding, []).append(name)
    findings = []
    for finding, names in names_by_finding.items():
        if len(names) < len(found):
            of_adapters = f"Adapter{'s' if len(names) > 1 else ''} {', '.join(names)}: {finding.found}"
            finding = dataclasses.replace(finding, found=of_adapters)
        findings.append(finding)
    return findings


def check_adapters(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting that keeps several adapters from training in one run."""
    if run.at(KEY) is None:
        return
    if not run.trains:
        yield error(
            KEY,
            f"run_mode is {run.mode}, and pet_config.adapters names adapters to train.",
            "Name one that is trained in adapter_path, and leave adapters out.",
        )
        return
    try:
        pet_config = PetLoraConfig.from_pet_config(run.pet_config)
        adapters = trained_adapters(pet_config)
    except LoraError as refusal:
        yield error(KEY, str(refusal))
        return
    yield from _check_kind(pet_config, adapters, PET)
    yield from _check_files(adapters, KEY)
    yield from _check_data(run, adapters)
    yield from _check_run(run)
    yield from _check_keys(run)
    for where, callback in run.callbacks:
        if callback.get("keep_last") == 1:
            yield error(
                f"{where}.keep_last",
                f"{where}.keep_last is 1, but pet_config has adapters, which are saved one after another: "
                "killed between two of them, the run would have no step that all have saved.",
                "Set it to 2 or more.",
            )
        if callback.get("type") not in (*OF_RUN, *OF_ADAPTER):
            yield error(
                where,
                f"{where} is for a run with one adapter, but pet_config has adapters.",
                f"Remove it; there are {', '.join(_WITH_OTHERS)}.",
            )


def _check_kind(pet_config: PetLoraConfig, adapters: List[TrainedAdapter], node: str) -> Iterator[Finding]:
    """Yields an error for each setting of pet_config, at ``node``, that runs with several adapters do not support."""
    key = f"{node}.adapters"
    if pet_config.variant is not LORA:
        yield error(key, f"{pet_config.variant.field} is True, but only plain LoRA trains beside others.", "Remove it.")
    for field in _NOT_WITH_OTHERS:
        if getattr(pet_config, field):
            yield error(
                f"{node}.{field}",
                f"{field} is {getattr(pet_config, field)!r}, which a run with several adapters does not support.",
                "Remove it, or train one adapter at a time.",
            )
    for adapter in adapters:
        init = adapter.config.lora_init
        reasons = {
            "changes the base that the other adapters train on": changes_base(init),
            "trains A alone, and adapters beside each other train all that they have": freezes_b(init),
        }
        for reason in (reason for reason, holds in reasons.items() if holds):
            yield error(
                key, f"lora_init of {adapter.name} is {init}, which {reason}.", "Use kaiming, gaussian or orthogonal."
            )


def _check_files(adapters: List[TrainedAdapter], key: str) -> Iterator[Finding]:
    """Yields an error for each adapter with missing data; ``key`` is the key of the adapters."""
    for adapter in adapters:
        path = adapter.data
        if path is not None and not (mindrecord_files(path) and os.path.exists(path)):
            yield error(
                key,
                f"data of the adapter {adapter.name} is {path}, where there is no MindRecord (the current "
                f"folder is {os.getcwd()}).",
                "Correct the path.",
            )


def _check_data(run: YamlRun, adapters: List[TrainedAdapter]) -> Iterator[Finding]:
    own = [adapter for adapter in adapters if adapter.data]
    if own and run.at("lr_schedule.warmup_epochs"):
        yield error(
            "lr_schedule.warmup_epochs",
            f"lr_schedule.warmup_epochs is set, and {own[0].name} has data of its own, with epochs of another length.",
            "Set warmup_steps or warmup_ratio.",
        )
    needed = (("train_dataset.data_loader.type", "MindDataset"), ("train_dataset.drop_remainder", True))
    for key, value in needed if own else ():
        if run.at(key) != value:
            yield error(
                key,
                f"{key} is {run.at(key)!r}, and {own[0].name} has data of its own, which is read as a "
                "MindRecord and in batches of equal size.",
                f"Set it to {value}.",
            )


def _check_run(run: YamlRun) -> Iterator[Finding]:
    requirements = (
        ("runner_wrapper.type", run.train_step, WRAPPER, "the train step keeps the adapters apart"),
        ("optimizer.type", run.optimizer, OPTIMIZER, "it is the optimizer that keeps them apart"),
        ("use_parallel", run.at("use_parallel") or False, False, "it was made for one device"),
        ("do_eval", run.at("do_eval") or False, False, "MindFormers' evaluation knows one adapter; use HeldOutLoss"),
        ("runner_config.sink_mode", run.setting("runner_config.sink_mode"), False, "each step is judged by itself"),
    )
    for key, value, needed, reason in requirements:
        if value != needed:
            yield error(key, f"{key} is {value!r}, but pet_config has adapters: {reason}.", f"Set it to {needed}.")
    if not run.in_graph_mode:
        yield error("context.mode", "context.mode is PyNative, and adapters train side by side in graph mode.")
    trains = run.model_name in _MCORE if run.is_mcore else "Llama" in str(run.model_name)
    if not trains:
        yield error(
            "model",
            f"The model is {run.model_name}, and several adapters train on MindFormers' legacy Llama, and of its "
            f"mcore models on {listed(_MCORE)}.",
            "Train one adapter at a time.",
        )
    elif run.is_mcore and run.model.get("moe_aux_loss_coeff"):
        yield error(
            f"{MODEL}.moe_aux_loss_coeff",
            f"moe_aux_loss_coeff is {run.model['moe_aux_loss_coeff']}, but pet_config has adapters: the loss that "
            "balances routed experts is of all rows of a batch, of whichever adapter.",
            "Set it to 0, or train one adapter at a time.",
        )
    if run.predicted_layers:
        yield error(
            f"{MODEL}.num_nextn_predict_layers",
            f"The model has {run.predicted_layers} layers that predict further tokens, but pet_config has adapters: "
            "their loss is not kept apart.",
            "Set it to 0.",
        )
    if run.at("grouped_lr_schedule"):
        yield error("grouped_lr_schedule", "grouped_lr_schedule is set, but each adapter has one learning rate.")


def _check_keys(run: YamlRun) -> Iterator[Finding]:
    for node, known in _KNOWN_KEYS.items():
        for key, value in (run.at(node) or {}).items():
            if key not in known and value not in (None, False):
                yield error(
                    f"{node}.{key}",
                    f"{node}.{key} is {value!r}, which a run with several adapters does not support.",
                    f"Remove it; there are {', '.join(known)}.",
                )
    scale = run.at("runner_wrapper.scale_sense")
    if isinstance(scale, Mapping):
        yield error(
            "runner_wrapper.scale_sense",
            "runner_wrapper.scale_sense is a node, and a loss scale that moves with one adapter would move the others.",
            "Write a number.",
        )


# Under MindFormers' PyNative Trainer: the YAML of a run with each adapter alone, and unsupported settings.

PYNATIVE_KEY = "pet_config.adapters"
_PYNATIVE_MODELS = ("Qwen3ForCausalLM", "DeepseekV3ForCausalLM")
# Callbacks of mindlora that support only one adapter.
OF_ONE_ADAPTER = (
    *("BaseCheck", "ReferenceCheck", "LoraInitialization", "AdapterHealth", "RankBudget", "SampleAnswers"),
    *("Forgetting", "ForgettingBudget"),
)
_PYNATIVE_OPTIMIZER_KEYS = ("type", "betas", "eps", "weight_decay", "weight_decay_include", "weight_decay_exclude")
# Keys that a run with several adapters does not support -> why.
_NOT_WITH_ADAPTERS = {
    "training.use_skip_step_on_nan": "each adapter skips such steps by itself",
    "model.calculate_per_token_loss": "each adapter has its own mean loss",
    "model.num_nextn_predict_layers": "a token further on has a loss that is not kept apart",
    "preference": "preferences are learned by one adapter",
}


def alone_in_pynative(configuration: Mapping[str, Any], adapter: TrainedAdapter, output: str) -> Dict[str, Any]:
    """Returns the YAML of a run with only this adapter, which writes to a folder of its name in ``output``.

    Its pet_config may select fewer cells than lora_config.
    """
    alone = copy.deepcopy(dict(configuration))
    pet_config = {key: value for key, value in alone["pet_config"].items() if key != "adapters"}
    alone["pet_config"] = {**pet_config, **adapter.own}
    own = {key: value for key, value in adapter.own.items() if key in ("lora_rank", "lora_alpha")}
    alone["lora_config"] = {**alone["lora_config"], **own}
    if adapter.learning_rate is not None:
        alone["lr_scheduler"] = {**(alone.get("lr_scheduler") or {}), "learning_rate": adapter.learning_rate}
    if adapter.data is not None:
        alone["train_dataset"]["dataloader"]["dataset_files"] = adapter.data
    write_to_own_folder(alone.get("callbacks") or [], adapter.name, output)
    return alone


def check_of_each(config: Mapping[str, Any], check: Callable[[Mapping[str, Any]], Iterator[Finding]]) -> List[Finding]:
    """Returns a check's findings in a YAML, or in the YAML of each adapter's run alone, merged as in check_cells."""
    if not value_at(config, PYNATIVE_KEY):
        return list(check(config))
    try:
        adapters = adapters_of(config)
    except LoraError:
        # check_pynative_adapters reports the error.
        return []
    return by_adapter({each.name: list(check(alone_in_pynative(config, each, ""))) for each in adapters})


def check_pynative_adapters(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting that keeps several adapters from training in one run of the PyNative Trainer.

    ``config`` is the content of a YAML whose lora_config has passed the checks.
    """
    types = [node.get("type") for node in config.get("callbacks") or [] if isinstance(node, Mapping)]
    if "EachAdapter" in types:
        found = "callbacks has EachAdapter, which mindlora adds to a run with pet_config.adapters."
        yield error("callbacks", found, "Remove it.")
    if value_at(config, PYNATIVE_KEY) is None:
        return
    try:
        adapters = adapters_of(config)
        yield from _check_kind(PetLoraConfig.from_pet_config(_of_all(config)), adapters, "pet_config")
    except LoraError as refusal:
        yield error(PYNATIVE_KEY, str(refusal))
        return
    yield from _check_files(adapters, PYNATIVE_KEY)
    yield from _check_pynative_data(config, adapters)
    yield from _check_pynative_run(config)
    alone = [name for name in types if name in OF_ONE_ADAPTER]
    if alone:
        found = f"callbacks has {listed(alone)}, for a run with one adapter, but pet_config has adapters."
        yield error("callbacks", found, f"Remove it; there are {', '.join(_WITH_OTHERS)}.")


def adapters_of(config: Mapping[str, Any]) -> List[TrainedAdapter]:
    """Returns the adapters of a YAML; raises LoraError as trained_adapters does."""
    with warnings.catch_warnings():
        # The warnings are issued where the adapters are made.
        warnings.simplefilter("ignore")
        return trained_adapters(PetLoraConfig.from_pet_config(_of_all(config)))


def _of_all(config: Mapping[str, Any]) -> Dict[str, Any]:
    """Returns pet_config with lora_config's settings for all adapters."""
    # The selection of cells does not matter here.
    return merged(config["pet_config"], config["lora_config"], ["all-linear"], "float32")


def _check_pynative_data(config: Mapping[str, Any], adapters: List[TrainedAdapter]) -> Iterator[Finding]:
    own = [adapter for adapter in adapters if adapter.data]
    if not own:
        return
    needed = (("train_dataset.dataloader.type", "MindDataset"), ("train_dataset.drop_remainder", True))
    for key, value in needed:
        # The Trainer drops a remainder unless the YAML says otherwise.
        if value_at(config, key) not in (value, None):
            yield error(
                key,
                f"{key} is {value_at(config, key)!r}, and {own[0].name} has data of its own, which is read as a "
                "MindRecord and in batches of equal size.",
                f"Set it to {value}.",
            )


def _check_pynative_run(config: Mapping[str, Any]) -> Iterator[Finding]:
    model = config.get("model") or {}
    classes = model.get("architectures")
    name = classes[0] if isinstance(classes, list) and classes else classes
    if name not in _PYNATIVE_MODELS:
        yield error(
            "model.architectures",
            f"The model is {name}, and under MindFormers' PyNative Trainer several adapters train on "
            f"{' and '.join(_PYNATIVE_MODELS)} alone.",
            "Train one adapter at a time.",
        )
    optimizer = config.get("optimizer") or {}
    kind = optimizer.get("type", OPTIMIZER)
    if kind != OPTIMIZER:
        found = f"optimizer.type is {kind!r}, but pet_config has adapters: it is the optimizer that keeps them apart."
        yield error("optimizer.type", found, f"Set it to {OPTIMIZER}.")
    for key, value in optimizer.items():
        if key not in _PYNATIVE_OPTIMIZER_KEYS and value not in (None, False):
            yield error(
                f"optimizer.{key}",
                f"optimizer.{key} is {shown(value)}, which a run with several adapters does not support.",
                f"Remove it; the keys that it supports are {', '.join(_PYNATIVE_OPTIMIZER_KEYS)}.",
            )
    for key, reason in _NOT_WITH_ADAPTERS.items():
        value = value_at(config, key)
        if value:
            yield error(key, f"{key} is {shown(value)}, but pet_config has adapters: {reason}.", "Remove it.")
    if (model.get("chunk_loss_num") or 0) > 1:
        found = f"model.chunk_loss_num is {model['chunk_loss_num']}, but the loss of each adapter is computed at once."
        yield error("model.chunk_loss_num", found, "Remove it.")
