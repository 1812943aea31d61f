"""What is wrong in a YAML, found before anything is built, and the few settings that mindlora-run fills in."""

import contextlib
from typing import Any, Dict, List

from mindformers.tools.register import MindFormerConfig
from mindspore.nn.utils import no_init_parameters

from mindlora.core.errors import ConfigError
from mindlora.core.numerics import initializers
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
from mindlora.training.held_out.eval_rows import cut_rows_for_eval
from mindlora.training.launch.launch_checks import fill_base
from mindlora.training.launch.registry_checks import check_classes
from mindlora.training.log import logger
from mindlora.training.preference.settings import preference_settings
from mindlora.training.resume import training_state
from mindlora.training.rl.preparation import prepare_rl
from mindlora.training.run_configuration import remember_configuration
from mindlora.training.several import resuming as several_adapters
from mindlora.training.several.data import DataOfAdapters
from mindlora.training.several.preparation import prepare_adapters
from mindlora.training.step import lora_plus, packing

# Gradient accumulation of a YAML, which becomes micro-batches of the train step.


def set_micro_batches(config: MindFormerConfig) -> None:
    """Turns K = gradient_accumulation_steps into batches of K batch_size rows and K micro-batches in the train step.

    So one step of MindSpore is one step of the optimizer, of the learning rate and of every callback. The YAML, which
    must have no mistakes, is changed in place.
    """
    steps = config.runner_config.gradient_accumulation_steps
    if steps in (None, 1) or not YamlRun(config).accumulates_here:
        return
    rows = config.runner_config.batch_size
    config.runner_wrapper.micro_batches = steps
    config.runner_config.batch_size = rows * steps
    config.runner_config.gradient_accumulation_steps = 1
    for _, callback in YamlRun(config).callbacks_of("TopkBiasBalanceCallback"):
        # The routers of mcore models add up how many tokens each expert got in all micro-batches.
        callback["gradient_accumulation_steps"] = steps
    logger.info("Each step has %d rows on each device: %d micro-batches of %d.", rows * steps, steps, rows)


# Starts the data of a resumed run where the checkpoint stopped: MindFormers builds it before any callback runs.


def fill_resume(config: MindFormerConfig) -> None:
    """Fills in from which step folder a run goes on, and where its data starts, if LoraCheckpoint says resume.

    Raises ConfigError if that folder does not exist, or no step is left.
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
    """Says in the runs of several adapters where each of them goes on, or stays as it had ended."""
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


# Lets BaseWeights load the base, tensor by tensor, where it can, and not MindFormers.


def take_base_over(config: MindFormerConfig) -> contextlib.AbstractContextManager:
    """Lets BaseWeights load the base, where it can; returns what the run has to be in.

    Then load_checkpoint is empty for MindFormers, and what is built in the context has no values until they are loaded;
    an mcore model, whose parameters hold more than weights, is built with values.
    """
    run = YamlRun(config)
    if not config.load_checkpoint or not loads_by_tensor(run):
        return contextlib.nullcontext()
    callbacks = config.callbacks or []
    config.callbacks = [MindFormerConfig(type="BaseWeights", path=config.load_checkpoint), *callbacks]
    config.load_checkpoint = ""
    config.auto_trans_ckpt = False
    return contextlib.nullcontext() if run.is_mcore else no_init_parameters()


# Callbacks that carry out a lora_init that changes the base.
_INITIALIZING_CALLBACKS = ("LoraCheckpoint", "LoraInitialization")


def prepare(config: MindFormerConfig) -> None:
    """Checks a run's configuration and fills in what follows from it: a preset's learning rate, resuming and so on.

    The YAML, with the command line's overrides, is changed in place. Raises ConfigError if a setting is wrong; the
    message gives the key, its value, and what it must be.
    """
    if not config.model or not config.model.model_config:
        refuse([error("model.model_config", "The YAML has no model.model_config: write a complete MindFormers YAML.")])
    run = YamlRun(config)
    refuse_and_log([*check_run(run), *find_by_mindformers(run)])
    fill(config)


def refuse_and_log(findings: List[Finding]) -> None:
    """Raises ConfigMistakes with all errors, if there are any, and logs warnings."""
    for finding in findings:
        if finding.severity == "warning":
            logger.warning(str(finding))
    refuse(findings)


def find_by_mindformers(run: YamlRun) -> List[Finding]:
    """Returns what is wrong in a YAML, whose nodes are of the right kind, as MindFormers' registry or files tell."""
    return [*check_classes(run), *check_contents(run, first_rows)]


def refuse_missing_files(config: MindFormerConfig) -> None:
    """Raises ConfigMistakes if files that the run needs are not there or not named, with the flags that set them."""
    refuse_and_log(list(check_files(YamlRun(config), complete=True)))


def fill(config: MindFormerConfig) -> None:
    """Fills in what follows from a YAML without mistakes, in place.

    Raises ConfigError if packed data or the checkpoint to resume from does not suit the run.
    """
    fill_base(config)
    pet_config = config.model.model_config.pet_config or {}
    if pet_config:
        expand_pet_type(pet_config)
    run = YamlRun(config)
    if run.is_mcore and run.steps_by_mindlora:
        # The step is mindlora's then, which adds the losses up; MindFormers' monitor would print zeros for them.
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
    """Makes a run compare the base of adapter_path with load_checkpoint, which MindFormers loads after the adapter."""
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
    """Adds LoraInitialization if lora_init changes the base, which MindFormers loads after it builds the network."""
    pet_config = config.model.model_config.pet_config or {}
    if not initializers.changes_base(pet_config.get("lora_init")) or pet_config.get("adapter_path"):
        return
    callbacks = config.callbacks or []
    if not any(callback.get("type") in _INITIALIZING_CALLBACKS for callback in callbacks):
        config.callbacks = [MindFormerConfig(type="LoraInitialization"), *callbacks]


def _add_reference_check(config):
    """Adds ReferenceCheck if the reference of preference training was computed before, and is in the data."""
    run = YamlRun(config)
    if run.preference is not None and preference_settings(run.preference).precomputed_reference:
        files = [path for _, paths in files_of_run(run) for path in paths]
        config.callbacks = [*(config.callbacks or []), MindFormerConfig(type="ReferenceCheck", files=files)]


def _move_lora_plus(config):
    """Moves loraplus_lr_ratio from pet_config, where MindFormers would not use it, into grouped learning rates."""
    ratio = (config.model.model_config.pet_config or {}).pop(lora_plus.KEY, None)
    if ratio is not None and config.run_mode in TRAINING_MODES:
        lora_plus.set_groups(config, ratio)
