"""Rules of learning from rewards: what runner_wrapper.rl requires of the rest of a YAML."""

import os
import warnings
from typing import Any, Dict, Iterator, List, Mapping

from mindlora.core.errors import ConfigError, LoraError
from mindlora.core.numerics.initializers import changes_base
from mindlora.core.yaml_file import PET, value_at
from mindlora.models.label_losses import IN_GRAPH_MODE as LOSS_IN_PIECES
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.mcore import check_served
from mindlora.run.checks.pet_config import PetLoraConfig
from mindlora.run.checks.pynative_adapter import merged
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.rl.reward_functions import PythonFunction
from mindlora.training.rl.settings import METRICS, SHARED, RlSettings, rl_settings
from mindlora.training.several.rules import KEY as ADAPTERS
from mindlora.training.several.rules import TrainedAdapter, by_adapter, rl_of, trained_adapters

KEY = "runner_wrapper.rl"
# Callbacks that read rows with labels: such a run has only prompts.
_OF_ROWS = ("HeldOutLoss", "Forgetting", "ForgettingBudget", "RankBudget")
# Settings with which sampler and trainer would not be one policy, or which the sampler does not support.
_OF_ADAPTERS = {
    "alora_invocation_tokens": "the sampler's adapter acts on all tokens",
    "neftune_alpha": "the sampler adds no noise",
    "modules_to_save": "the sampler's base stays what it is",
    "freeze_exclude": "the sampler's base stays what it is",
}


def settings_of(run: YamlRun) -> Dict[str, RlSettings]:
    """Returns name -> settings of each adapter in a run that learns from rewards; a single adapter's name is "".

    Raises ConfigError as rl_settings does, or if adapters differ in shared settings.
    """
    adapters = _adapters(run)
    # Values other than nodes are refused elsewhere.
    if not adapters or not isinstance(run.rl, Mapping):
        return {"": rl_settings(run.rl)}
    return {adapter.name: _settings_of(run, adapter) for adapter in adapters}


def _adapters(run: YamlRun) -> List[TrainedAdapter]:
    if not run.pet_config or not run.pet_config.get("adapters"):
        return []
    with warnings.catch_warnings():
        # The warnings are issued where the adapters are checked.
        warnings.simplefilter("ignore")
        return trained_adapters(PetLoraConfig.from_pet_config(run.pet_config))


def _settings_of(run: YamlRun, adapter: TrainedAdapter) -> RlSettings:
    for key in adapter.rl:
        if key in SHARED:
            raise ConfigError(
                f"rl of the adapter {adapter.name} has {key}, in which adapters cannot differ: {SHARED[key]}. Write it "
                f"into {KEY}, or use two runs."
            )
    try:
        return rl_settings(rl_of(run.rl, adapter))
    except ConfigError as refusal:
        raise ConfigError(f"{adapter.name}: {refusal}") from refusal


def check_rl(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting with which a training run cannot learn from rewards."""
    if not run.trains:
        return
    try:
        adapters = _adapters(run)
    except LoraError:
        # check_adapters reports the error.
        return
    if run.rl is None:
        for adapter in adapters:
            if adapter.rl:
                found = (
                    f"The adapter {adapter.name} has rl, but the run does not learn from rewards: there is no {KEY}."
                )
                yield error(ADAPTERS, found, f"Add {KEY}, or remove rl.")
        return
    try:
        settings = settings_of(run)
    except ConfigError as refusal:
        yield error(KEY, str(refusal))
        return
    if run.train_step != WRAPPER:
        yield error(
            KEY,
            f"rl is an argument of {WRAPPER}, and runner_wrapper.type is {run.train_step}.",
            f"Set runner_wrapper.type: {WRAPPER}.",
        )
    if run.in_parallel and run.split_by:
        yield error(
            KEY,
            f"A run with rl has the whole model in each process, but {run.split_by}.",
            "Learn from rewards in data parallel (parallel.parallel_mode: 0), or in one process.",
        )
    shares = run.setting("parallel_config.data_parallel") if run.in_parallel else 1
    prompts = next(iter(settings.values())).prompts_per_step
    if prompts % shares:
        yield error(
            f"{KEY}.prompts_per_step",
            f"rl.prompts_per_step is {prompts}, and {shares} processes (parallel_config.data_parallel) answer as many "
            "prompts each.",
            f"Set it to a multiple of {shares}.",
        )
    if run.preference is not None:
        yield error(KEY, "runner_wrapper has rl and preference, and a run learns from one of them.", "Remove one.")
    if len({each.gkd is None for each in settings.values()}) > 1:
        found = "Some adapters have gkd, and others do not, but the same is computed for all of them."
        yield error(KEY, found, "Write gkd for all of them, or for none; or use two runs.")
    elif len({each.best_metric for each in settings.values()}) > 1:
        found = "Some adapters have rewards, and others a teacher alone, so that no metric says which is best."
        yield error(KEY, found, "Name reward_funcs for all of them, or for none.")
    yield from _check_adapter(run)
    yield from by_adapter({name: list(_check_policy(run, each)) for name, each in settings.items()})
    yield from check_served(run)
    for adapter in adapters:
        if adapter.data:
            found = f"The adapter {adapter.name} has data, but a run with rl has prompts alone."
            yield error(ADAPTERS, found, f"Remove data; prompts are in {KEY}.prompts.")


def _check_policy(run: YamlRun, settings: RlSettings) -> Iterator[Finding]:
    """Yields an error for each setting that contradicts one adapter's settings of rl."""
    yield from _check_sizes(run, settings)
    yield from _check_saving(run, settings)
    yield from _check_files(run, settings)


def _check_adapter(run: YamlRun) -> Iterator[Finding]:
    pet_config = run.pet_config
    if not pet_config:
        yield error(PET, "rl trains an adapter, but there is no pet_config.", "Add one (pet_type: lora).")
        return
    dropout = pet_config.get("lora_dropout") or 0
    if dropout:
        yield error(
            f"{PET}.lora_dropout",
            f"pet_config.lora_dropout is {dropout}, with which the trainer's log-probabilities are not those of the "
            "sampler.",
            "Set it to 0.0.",
        )
    if run.holds_as_stored:
        yield error(
            f"{PET}.quantize_base",
            "The base is to be held as it is stored, but rl samples from one in float or in NF4.",
            "Remove it, or set it to nf4.",
        )
    yield from _check_variant(run)
    for key, reason in _OF_ADAPTERS.items():
        if pet_config.get(key):
            yield error(f"{PET}.{key}", f"pet_config has {key}, and runner_wrapper rl: {reason}.", f"Remove {key}.")
    if changes_base(pet_config.get("lora_init")) and not pet_config.get("adapter_path"):
        yield error(
            f"{PET}.lora_init",
            f"pet_config.lora_init is {pet_config['lora_init']}, which changes the base, and the base is the reference "
            "of rl.",
            "Use another one.",
        )


def _check_variant(run: YamlRun) -> Iterator[Finding]:
    if run.lora is None or run.lora.variant.is_plain:
        return
    name = run.lora.variant.name
    if not run.lora.variant.row_norms:
        yield error(PET, f"The adapter is of {name}, and rl samples with plain LoRA or DoRA.", "Leave its keys out.")
    elif (run.at("context.device_target") or "Ascend") != "CPU":
        yield error(PET, f"The adapter is of {name}, with which rl samples on a CPU alone.", "Leave its keys out.")


def _check_sizes(run: YamlRun, settings: RlSettings) -> Iterator[Finding]:
    length = run.model.get("seq_length")
    if not isinstance(length, int):
        yield error(
            "model.model_config.seq_length",
            "model.model_config.seq_length is missing, which says how long a prompt and its answer can be.",
            "Set it.",
        )
    elif settings.max_completion_length >= length:
        yield error(
            f"{KEY}.max_completion_length",
            f"rl.max_completion_length is {settings.max_completion_length} and seq_length {length}, which leaves no "
            "room for a prompt.",
            "Lower the first, or raise the second.",
        )
    if run.accumulation > 1:
        yield error(
            "runner_config.gradient_accumulation_steps",
            "runner_config.gradient_accumulation_steps is above 1, but a step of rl takes its answers in batches of "
            "runner_config.batch_size rows as it is.",
            "Set it to 1.",
        )
    if settings.gkd is not None and run.at(LOSS_IN_PIECES) is False:
        yield error(
            LOSS_IN_PIECES,
            f"{LOSS_IN_PIECES} is False, and rl.gkd compares the whole vocabulary for some tokens at a time.",
            "Remove it.",
        )
    if run.at("runner_config.sink_mode"):
        yield error(
            "runner_config.sink_mode", "A step of rl samples on the host, between two graphs.", "Set it to False."
        )


def _check_saving(run: YamlRun, settings: RlSettings) -> Iterator[Finding]:
    for where, callback in run.callbacks:
        if callback.get("type") in _OF_ROWS:
            yield error(where, f"{where} needs rows with labels, but a run with rl has prompts alone.", "Remove it.")
    for where, callback in run.callbacks_of("LoraCheckpoint"):
        if callback.get("save_steps", 100) % settings.num_iterations:
            yield error(
                f"{where}.save_steps",
                f"{where}: save_steps is {callback.get('save_steps', 100)} and rl.num_iterations is "
                f"{settings.num_iterations}: a run could not go on between two steps on the same answers.",
                "Make save_steps a multiple of it.",
            )
        metric = callback.get("best_metric", settings.best_metric)
        is_held_out = settings.held_out_prompts and metric in METRICS and metric.startswith("held_out_")
        if is_held_out and callback.get("save_steps", 100) % settings.held_out_steps:
            yield error(
                f"{where}.save_steps",
                f"{where}: save_steps is {callback.get('save_steps', 100)}, but {metric} is measured every "
                f"{settings.held_out_steps} steps (rl.held_out_steps).",
                "Make save_steps a multiple of that.",
            )


def _check_files(run: YamlRun, settings: RlSettings) -> Iterator[Finding]:
    if not settings.prompts:
        yield error(f"{KEY}.prompts", "rl has no prompts.", "Name a file with a prompt in each row.")
    for name in ("prompts", "held_out_prompts"):
        path = getattr(settings, name)
        if path and not os.path.exists(path):
            yield error(f"{KEY}.{name}", f"rl.{name}: {path} does not exist.", "Correct the path.")
    teacher = settings.teacher_adapter
    if teacher is not None and not os.path.exists(teacher):
        yield error(
            f"{KEY}.teacher",
            f"rl.teacher: there is no adapter at {teacher}.",
            "Correct the path, or write base or {url: ..., model: ...}.",
        )
    for function in (*settings.reward_funcs, *settings.tools):
        if isinstance(function, PythonFunction) and not os.path.isfile(function.path):
            yield error(
                f"runner_wrapper.{function.key}",
                f"{function.key} names {function.path}, which is not in the folder where the run starts.",
                "Correct the path.",
            )
    if settings.tokenizer is None and run.tokenizer is None:
        yield error(
            f"{KEY}.tokenizer",
            "There is no tokenizer beside the base, and rl.tokenizer names none.",
            "Name its folder.",
        )


def steps_of(prompts: int, epochs: int, settings: RlSettings) -> int:
    """Returns the number of optimizer steps of a run.

    Raises ConfigError if there are fewer prompts than a step answers.
    """
    check_prompts(prompts, settings)
    return prompts // settings.prompts_per_step * epochs * settings.num_iterations


def check_prompts(prompts: int, settings: RlSettings) -> None:
    """Raises ConfigError if there are fewer prompts than a step answers."""
    if prompts < settings.prompts_per_step:
        raise ConfigError(
            f"{settings.prompts} has {prompts} prompts, and rl.prompts_per_step is {settings.prompts_per_step}. Lower "
            "it, or write more prompts."
        )


# Under MindFormers' PyNative Trainer: its YAML as one of graph mode, by whose rules it is checked


# Where it is in a YAML of the PyNative Trainer.
AT_THE_TOP = "rl"
# Its train_dataset, which mindlora-run fills in: the Trainer takes no YAML without one.
DATA = {"dataloader": {"type": "RlSteps"}}
# Keys with which the model takes more than tokens -> what.
_FROM_ROWS = {
    "use_eod_attn_mask_compression": "the ends of examples",
    "use_rotary_position_ids": "the positions of tokens",
}
# How the rows of joined cells lie, which the PyNative Trainer's models do not read.
_LAYOUTS = ("use_contiguous_weight_layout_attention", "use_interleaved_weight_layout_mlp")
# Key of graph mode -> that of the PyNative Trainer, in the order in which they are replaced.
_KEYS = {
    KEY: AT_THE_TOP,
    "runner_wrapper.loss_in_pieces": "pet_config.loss_in_pieces",
    "runner_wrapper has": "the YAML has",
    "runner_wrapper rl": "rl",
    "runner_config.batch_size": "training.local_batch_size",
    f"{PET}.lora_dropout": "lora_config.lora_dropout",
    "pet_config.lora_dropout is": "lora_config.lora_dropout is",
    PET: "pet_config",
    " (use_legacy: False)": "",
    "use_legacy": "model.architectures",
    "model.model_config": "model",
}


def as_in_graph_mode(config: Mapping[str, Any]) -> YamlRun:
    """Returns the run of a YAML of the PyNative Trainer that has ``rl``, as one of graph mode describes it.

    Its adapter is that of lora_config and pet_config, and its model's joined cells are as the Trainer builds them.
    """
    training = config.get("training") or {}
    model = {key: value for key, value in (config.get("model") or {}).items() if key not in _LAYOUTS}
    # Which cells it is counts for nothing that is looked at here.
    pet_config = merged(config.get("pet_config") or {}, config.get("lora_config") or {}, ["all-linear"], "float32")
    return YamlRun(
        {
            "run_mode": "train",
            "use_legacy": False,
            "use_parallel": False,
            "seed": training.get("seed", 0),
            "context": {**(config.get("context") or {}), "mode": 0},
            "model": {"model_config": {**model, "pet_config": {"pet_type": "lora", **pet_config}}},
            "checkpoint": config.get("checkpoint") or {},
            "runner_wrapper": {
                "type": WRAPPER,
                "loss_in_pieces": (config.get("pet_config") or {}).get("loss_in_pieces", True),
                **{key: config.get(key) for key in (AT_THE_TOP, "preference")},
            },
            "runner_config": {"batch_size": training.get("local_batch_size", 1)},
            "callbacks": list(config.get("callbacks") or []),
        }
    )


def check_pynative_rl(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each thing that keeps a run of MindFormers' PyNative Trainer from learning as ``rl`` at the
    top of its YAML asks.

    Args:
        config (mapping): The content of the YAML, whose lora_config has no mistakes.
    """
    if config.get(AT_THE_TOP) is None and value_at(config, "pet_config.adapters") is None:
        return
    try:
        run = as_in_graph_mode(config)
        found = list(check_rl(run))
    except LoraError:
        # check_adapter says what is wrong.
        return
    yield from map(_with_keys_of_pynative, found)
    if run.rl is not None and not found:
        yield from _check_pynative(config, run)


def _check_pynative(config: Mapping[str, Any], run: YamlRun) -> Iterator[Finding]:
    here = "under MindFormers' PyNative Trainer"
    if run.lora is not None and not run.lora.variant.is_plain:
        found = f"The adapter is of {run.lora.variant.name}, and rl samples with plain LoRA {here}."
        yield error("pet_config", found, "Leave its keys out.")
    experts = [key for key in ("num_experts", "n_routed_experts") if value_at(config, f"model.{key}")]
    if experts:
        found = f"The model has routed experts, whose weights the sampler does not share {here}."
        yield error(f"model.{experts[0]}", found, "Learn from rewards on a model without them, or in graph mode.")
    for key, what in _FROM_ROWS.items():
        if value_at(config, f"model.{key}"):
            found = f"model.{key} makes the model ask for {what}, which rl does not give it {here}."
            yield error(f"model.{key}", found, "Remove it.")
    loader = value_at(config, "train_dataset.dataloader.type")
    if loader not in (None, DATA["dataloader"]["type"]):
        yield error(
            "train_dataset.dataloader.type",
            f"train_dataset.dataloader.type is {loader}, but a run with rl has prompts alone.",
            f"Leave train_dataset to mindlora-run, or set its dataloader.type to {DATA['dataloader']['type']}.",
        )
    training = config.get("training") or {}
    local, whole = (training.get(f"{kind}_batch_size", 1) for kind in ("local", "global"))
    if local != whole:
        yield error(
            "training.global_batch_size",
            f"training.global_batch_size is {whole} and local_batch_size {local}, but a step of rl takes its answers "
            "in batches of local_batch_size rows as it is.",
            f"Set global_batch_size: {local}.",
        )
    saved = config.get("checkpoint") or {}
    every = saved.get("save_interleaved_steps", 1000)
    iterations = next(iter(settings_of(run).values())).num_iterations
    if saved.get("enable_save", True) and every % iterations:
        yield error(
            "checkpoint.save_interleaved_steps",
            f"checkpoint.save_interleaved_steps is {every} and rl.num_iterations is {iterations}: a run could not go "
            "on between two steps on the same answers.",
            "Make it a multiple of that.",
        )


def _with_keys_of_pynative(finding: Finding) -> Finding:
    """Returns a finding of graph mode's checks with the keys of the PyNative Trainer."""
    return Finding(finding.severity, *(_renamed(text) for text in (finding.key, finding.found, finding.advice)))


def _renamed(text: str) -> str:
    for key, there in _KEYS.items():
        text = text.replace(key, there)
    return text
