"""Checks of a YAML before anything is built, and the few settings that mindlora-run fills in."""

import contextlib
import difflib
import inspect
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from mindformers.tools.register import MindFormerConfig, MindFormerModuleType, MindFormerRegister
from mindspore.nn.utils import no_init_parameters

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.numerics import initializers
from mindlora.core.text import suggestion
from mindlora.core.yaml_file import TRAINING_MODES
from mindlora.data.mindrecord import first_rows
from mindlora.models.lora_config import PRESETS, expand_pet_type
from mindlora.run.checks.base_weights import loads_by_tensor
from mindlora.run.checks.batches import rows_left_out
from mindlora.run.checks.data_rows import files_of_run
from mindlora.run.checks.examine import check_contents, check_run
from mindlora.run.checks.files import check_files
from mindlora.run.checks.finding import Finding, error, refuse
from mindlora.run.checks.parallel import is_scattered
from mindlora.run.yaml_run import YamlRun
from mindlora.training.adalora.callback import prepare_budget
from mindlora.training.callbacks.registry import arrange_callbacks
from mindlora.training.exchange.exchange_check import prepare_exchange
from mindlora.training.health.adapter_health import record_gradient_norms
from mindlora.training.held_out.rows import cut_rows_for_eval
from mindlora.training.launch import hooks  # noqa: F401  registers mindlora's classes
from mindlora.training.launch.launch_checks import fill_base
from mindlora.training.log import logger
from mindlora.training.preference.settings import preference_settings
from mindlora.training.resume import training_state
from mindlora.training.rl.graph_mode import prepare_rl
from mindlora.training.run_configuration import remember_configuration
from mindlora.training.several import resuming as several_adapters
from mindlora.training.several.graph_mode import DataOfAdapters, prepare_adapters
from mindlora.training.step import lora_plus, packing

# Key of the YAML -> the kind of class that its ``type`` names, for any run and for training runs. MindFormers does not
# build the latter in other runs, and its prediction YAMLs name optimizers that no longer exist.
_KINDS = {"metric": MindFormerModuleType.METRIC, "trainer": MindFormerModuleType.TRAINER}
_TRAINING_KINDS = {
    "optimizer": MindFormerModuleType.OPTIMIZER,
    "lr_schedule": MindFormerModuleType.LR,
    "runner_wrapper": MindFormerModuleType.WRAPPER,
}
# The same for legacy models.
_LEGACY_KINDS = {"model.arch": MindFormerModuleType.MODELS, "model.model_config": MindFormerModuleType.CONFIG}
_DATA_KINDS = {
    "{}_dataset.data_loader": MindFormerModuleType.DATASET_LOADER,
    "{}_dataset_task": MindFormerModuleType.DATASET,
}
# Settings that MindFormers' Trainer reads itself, in addition to the arguments of the class.
_READ_BY_TRAINER = {"lr_schedule": ("warmup_epochs",)}
# Callbacks whose arguments a rule of run/checks covers.
_RULED = ("Trackers",)
# These classes accept any argument and ignore unknown ones, so that a misspelt argument has no effect. An argument this
# similar to a known one counts as misspelt.
_NEAR = 0.85


# A YAML's gradient accumulation becomes micro-batches of the train step.


def set_micro_batches(config: MindFormerConfig) -> None:
    """Turns K = gradient_accumulation_steps into batches of K batch_size rows and K micro-batches per train step.

    So one step of MindSpore is one step of the optimizer, the learning rate and every callback. The YAML, which must
    have passed the checks, is changed in place.
    """
    steps = config.runner_config.gradient_accumulation_steps
    if steps in (None, 1) or not YamlRun(config).accumulates_here:
        return
    rows = config.runner_config.batch_size
    config.runner_wrapper.micro_batches = steps
    config.runner_config.batch_size = rows * steps
    config.runner_config.gradient_accumulation_steps = 1
    for _, callback in YamlRun(config).callbacks_of("TopkBiasBalanceCallback"):
        # The routers of mcore models add up each expert's tokens over all micro-batches.
        callback["gradient_accumulation_steps"] = steps
    logger.info("Each step has %d rows on each device: %d micro-batches of %d.", rows * steps, steps, rows)


# Starts a resumed run's data where the checkpoint stopped: MindFormers builds the data before any callback runs.


def fill_resume(config: MindFormerConfig) -> None:
    """Fills in the step folder from which a run resumes, and where its data starts, if LoraCheckpoint says resume.

    Raises ConfigError if the folder does not exist or no step is left.
    """
    for _, callback in YamlRun(config).callbacks_of("LoraCheckpoint"):
        if callback.get("resume"):
            directory = training_state.checkpoint_directory(callback.get("directory"))
            folder = training_state.resume_folder(directory, callback["resume"])
            callback["resume"] = folder
            _start_data_after(config, folder)
    for _, callback in YamlRun(config).callbacks_of("EachAdapter"):
        _resume_adapters(config, callback["runs"], callback["directory"])


def _resume_adapters(config: MindFormerConfig, runs: List[Dict[str, Any]], directory: str) -> None:
    """Fills in, for each of several adapters' runs, where it resumes, or that it has ended."""
    resume = _saving(runs[0]).get("resume")
    if not resume:
        return
    adapters = [{**run, "directory": _saving(run)["directory"]} for run in runs]
    saved = several_adapters.find_saved(directory, resume, adapters)
    for run in runs:
        folder, ended = saved[run["name"]]
        _saving(run)["resume"] = folder
        if ended:
            run.update(folder=folder, ended=ended)
    _start_data_after(config, next(folder for folder, ended in saved.values() if not ended))
    if config.train_dataset_task.type == DataOfAdapters.__name__:
        config.train_dataset_task.first_step = config.data_skip_steps


def _saving(run: Dict[str, Any]) -> Dict[str, Any]:
    """Returns the node of LoraCheckpoint in the run of one adapter; empty if there is none."""
    return next((callback for _, callback in YamlRun(run["configuration"]).callbacks_of("LoraCheckpoint")), {})


def _start_data_after(config: MindFormerConfig, folder: str) -> None:
    metadata = training_state.read_metadata(folder)
    epochs = config.runner_config.epochs
    if not config.runner_config.sink_mode and metadata["step"] >= metadata["steps_per_epoch"] * epochs:
        raise ConfigError(
            f"{folder} was saved at the last step of {epochs} epochs, so nothing is left to train. "
            "Raise runner_config.epochs to train longer."
        )
    config.data_skip_steps = metadata["step"]
    logger.info("Resuming from %s: the data starts at step %d.", folder, config.data_skip_steps)


# Where possible, BaseWeights loads the base, tensor by tensor, instead of MindFormers.


def take_base_over(config: MindFormerConfig) -> contextlib.AbstractContextManager:
    """Makes BaseWeights load the base where it can; returns the context in which the model must be built.

    load_checkpoint is then empty for MindFormers, and parameters built in the context have no values until they are
    loaded; an mcore model, whose parameters hold more than weights, is built with values.
    """
    run = YamlRun(config)
    if not config.load_checkpoint or not loads_by_tensor(run):
        return contextlib.nullcontext()
    callbacks = config.callbacks or []
    config.callbacks = [MindFormerConfig(type="BaseWeights", path=config.load_checkpoint), *callbacks]
    config.load_checkpoint = ""
    config.auto_trans_ckpt = False
    return contextlib.nullcontext() if run.is_mcore else no_init_parameters()


# Callbacks that carry out a lora_init computed from the base.
_INITIALIZING_CALLBACKS = ("LoraCheckpoint", "LoraInitialization")


def prepare(config: MindFormerConfig) -> None:
    """Checks a run's configuration and fills in derived settings: a preset's learning rate, resuming and so on.

    The YAML, with the command line's overrides, is changed in place. Raises ConfigError if a setting is wrong; the
    message gives the key, its value, and the allowed values.
    """
    if not config.model or not config.model.model_config:
        refuse([error("model.model_config", "The YAML has no model.model_config: write a complete MindFormers YAML.")])
    run = YamlRun(config)
    refuse_and_log([*check_run(run), *find_by_mindformers(run)])
    fill(config)


def refuse_and_log(findings: List[Finding]) -> None:
    """Raises ConfigMistakes with all errors, if any, and logs the warnings."""
    for finding in findings:
        if finding.severity == "warning":
            logger.warning(str(finding))
    refuse(findings)


def find_by_mindformers(run: YamlRun) -> List[Finding]:
    """Returns findings about a YAML with well-formed nodes that need MindFormers' registry or files."""
    return [*check_classes(run), *check_contents(run, first_rows)]


def refuse_missing_files(config: MindFormerConfig) -> None:
    """Raises ConfigMistakes if files that the run needs are missing or not named, with the flags that set them."""
    refuse_and_log(list(check_files(YamlRun(config), complete=True)))


def fill(config: MindFormerConfig) -> None:
    """Fills in the settings derived from a YAML that has passed the checks, in place.

    Raises ConfigError if packed data or the checkpoint to resume from does not suit the run.
    """
    fill_base(config)
    pet_config = config.model.model_config.pet_config or {}
    if pet_config:
        expand_pet_type(pet_config)
    run = YamlRun(config)
    if run.is_mcore and run.steps_by_mindlora:
        # mindlora's step then adds up the losses; MindFormers' monitor would print zeros for them.
        config.print_separate_loss = False
    _add_base_check(config)
    if config.run_mode in TRAINING_MODES:
        _fill_adapter_slices(config)
        _fill_preset_learning_rate(config)
        _add_initialization(config)
        _add_reference_check(config)
        for sentence in rows_left_out(run):
            logger.info(sentence)
        packing.set_boundary(config)
        prepare_rl(config)
        set_micro_batches(config)
        prepare_exchange(config)
        prepare_budget(config)
        arrange_callbacks(config)
        record_gradient_norms(config)
        prepare_adapters(config)
        fill_resume(config)
    packing.check_eval_data(config)
    cut_rows_for_eval(config)
    _move_lora_plus(config)
    set_base_format(config)
    remember_configuration(config)


def set_base_format(config: MindFormerConfig) -> None:
    """Sets load_ckpt_format for a quantized base, which has one format."""
    quantized = (config.model.model_config.pet_config or {}).get("quantize_base")
    if quantized and config.load_checkpoint and config.load_ckpt_format != "safetensors":
        config.load_ckpt_format = "safetensors"
        logger.info("load_ckpt_format is set to safetensors, the format of a quantized base.")


def _fill_adapter_slices(config):
    """Makes each rank load its own slices, if adapter_path is a folder that mindlora adapter scatter wrote."""
    path = (config.model.model_config.pet_config or {}).get("adapter_path")
    if is_scattered(path):
        config.callbacks = [MindFormerConfig(type="AdapterSlices", path=path), *(config.callbacks or [])]


def _add_base_check(config):
    """Makes a run compare adapter_path's base with load_checkpoint, which MindFormers loads after the adapter."""
    path = (config.model.model_config.pet_config or {}).get("adapter_path")
    key = {"eval": "eval_callbacks", **dict.fromkeys(TRAINING_MODES, "callbacks")}.get(config.run_mode)
    if path and key and not is_scattered(path):
        config[key] = [MindFormerConfig(type="BaseCheck"), *(config[key] or [])]


def _fill_preset_learning_rate(config):
    preset = (config.model.model_config.pet_config or {}).get("preset")
    if preset and config.lr_schedule and config.lr_schedule.get("learning_rate") is None:
        config.lr_schedule.learning_rate = PRESETS[preset]["learning_rate"]
        logger.info("lr_schedule.learning_rate is %g, from preset %s.", config.lr_schedule.learning_rate, preset)


def _add_initialization(config):
    """Adds LoraInitialization if lora_init needs the base, which MindFormers loads after it builds the network."""
    pet_config = config.model.model_config.pet_config or {}
    if not initializers.computed_from_base(pet_config.get("lora_init")) or pet_config.get("adapter_path"):
        return
    callbacks = config.callbacks or []
    if not any(callback.get("type") in _INITIALIZING_CALLBACKS for callback in callbacks):
        config.callbacks = [MindFormerConfig(type="LoraInitialization"), *callbacks]


def _add_reference_check(config):
    """Adds ReferenceCheck if the data contains a precomputed reference for preference training."""
    run = YamlRun(config)
    if run.preference is not None and preference_settings(run.preference).precomputed_reference:
        files = [path for _, paths in files_of_run(run) for path in paths]
        config.callbacks = [*(config.callbacks or []), MindFormerConfig(type="ReferenceCheck", files=files)]


def _move_lora_plus(config):
    """Moves loraplus_lr_ratio from pet_config, where MindFormers would not use it, into grouped learning rates."""
    ratio = (config.model.model_config.pet_config or {}).pop(lora_plus.KEY, None)
    if ratio is not None and config.run_mode in TRAINING_MODES:
        lora_plus.set_groups(config, ratio)


def check_classes(run: YamlRun) -> Iterator[Finding]:
    """Yields a finding for each class in the YAML that does not exist, or that does not take one of its arguments.

    Model keys that nothing reads cause warnings: MindFormers' own YAMLs have ``num_block`` and
    ``max_position_embeddings``.
    """
    # The data of a run that learns from rewards is its prompts.
    data = run.mode if not run.trains else "train" if run.rl is None else None
    data_kinds = {key.format(data): kind for key, kind in _DATA_KINDS.items()} if data in ("train", "eval") else {}
    needed = {**({} if run.is_mcore else _LEGACY_KINDS), **data_kinds}
    for key, kind in {**_KINDS, **(_TRAINING_KINDS if run.trains else {}), **needed}.items():
        nodes = _nodes(run.at(key))
        if not any(node.get("type") for node in nodes) and (nodes or key in needed):
            yield error(key, f"{key} has no type, so MindFormers does not know what to build.")
        for node in nodes:
            yield from _unknown(key, kind, node)
            yield from _misspelt(key, kind, node)
    yield from _missing_rate(run)
    for where, callback in run.callbacks if run.trains else ():
        yield from _unknown(where, MindFormerModuleType.CALLBACK, callback)
        if callback.get("type") not in _RULED:
            yield from _wrong_arguments(where, callback) or _wrong_values(where, callback)


def _nodes(node: Any) -> List[dict]:
    return [item for item in (node if isinstance(node, list) else [node]) if isinstance(item, dict)]


def _class_of(kind: str, node: dict) -> Optional[type]:
    """Returns the class that a node names; None if it is not registered or is the user's own."""
    name = node.get("type")
    is_registered = name is not None and not node.get("auto_register") and MindFormerRegister.is_exist(kind, name)
    return MindFormerRegister.get_cls(kind, name) if is_registered else None


def _unknown(where: str, kind: str, node: dict) -> Iterator[Finding]:
    name = node.get("type")
    # A user's own class is registered when MindFormers imports the module that auto_register names.
    if name is None or node.get("auto_register") or MindFormerRegister.is_exist(kind, name):
        return
    registered = [each for each in MindFormerRegister.registry.get(kind, {}) if not each.startswith("_")]
    hint = suggestion(str(name), sorted(registered))
    yield error(f"{where}.type", f"{where}.type is {name!r}, which is not registered.{hint}")


def _missing_rate(run: YamlRun) -> Iterator[Finding]:
    node = run.at("lr_schedule") or {}
    schedule = _class_of(MindFormerModuleType.LR, node)
    if schedule is None or node.get("learning_rate") is not None or run.pet_config.get("preset") or not run.trains:
        return
    if "learning_rate" in _required(schedule):
        fault = f"lr_schedule has no learning_rate, which {node['type']} needs."
        yield error("lr_schedule", fault, "Set it, or a preset in pet_config.")


def _misspelt(where: str, kind: str, node: dict) -> Iterator[Finding]:
    named = _class_of(kind, node)
    name = node.get("type")
    if named is None:
        return
    arguments = _settings(named)
    for argument in node:
        if argument not in ("type", *arguments, *_READ_BY_TRAINER.get(where, ())):
            near = difflib.get_close_matches(argument, sorted(set(arguments) - set(node)), n=1, cutoff=_NEAR)
            if near:
                fault = f"{where} has {argument!r}, which {name} does not know. Did you mean {near[0]!r}?"
                yield Finding("warning" if where in _LEGACY_KINDS else "error", f"{where}.{argument}", fault)


def _wrong_arguments(where: str, node: dict) -> List[Finding]:
    callback = _class_of(MindFormerModuleType.CALLBACK, node)
    arguments, takes_any = _parameters(callback) if callback else ([], True)
    unknown = [] if takes_any else [argument for argument in node if argument not in ("type", *arguments)]
    return [
        error(where, f"{where} has no argument {argument!r}.{suggestion(argument, arguments)}") for argument in unknown
    ]


def _wrong_values(where: str, node: dict) -> List[Finding]:
    """Builds a callback of mindlora, which only checks its settings, and yields the error."""
    callback = _class_of(MindFormerModuleType.CALLBACK, node)
    if callback is None or not callback.__module__.startswith("mindlora."):
        return []
    missing = [argument for argument in _required(callback) if argument not in node]
    if missing:
        return [error(where, f"{where} needs {' and '.join(missing)}.")]
    try:
        callback(**{argument: value for argument, value in node.items() if argument != "type"})
    except (LoraError, TypeError) as refusal:
        return [error(where, f"{where}: {refusal}")]
    return []


def _required(kind: type) -> Sequence[str]:
    """Returns the arguments of a class that have no default."""
    parameters = inspect.signature(kind).parameters.values()
    named = (argument for argument in parameters if argument.kind is argument.POSITIONAL_OR_KEYWORD)
    return [argument.name for argument in named if argument.default is argument.empty]


def _settings(kind: type) -> Set[str]:
    """Returns the names of a class's arguments, including those passed on to its base classes."""
    try:
        arguments = set(inspect.signature(kind).parameters)
    except ValueError:
        # A C++ class has no signature.
        arguments = set()
    bases = inspect.getmro(kind) if inspect.isclass(kind) else ()
    return arguments.union(*(_parameters(base)[0] for base in bases if inspect.isfunction(vars(base).get("__init__"))))


def _parameters(kind: type) -> Tuple[List[str], bool]:
    """Returns the names of a class's arguments, and whether it takes any others."""
    parameters = [
        parameter for name, parameter in inspect.signature(kind.__init__).parameters.items() if name != "self"
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD], takes_any
