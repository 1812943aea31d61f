"""Learning from rewards under MindFormers' PyNative Trainer: its YAML as one of graph mode, by whose rules it is
checked."""

from typing import Any, Iterator, Mapping

from mindlora.core.errors import LoraError
from mindlora.core.yaml_file import PET, value_at
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.pynative_adapter import merged
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.rl.rules import KEY, check_rl, settings_of

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
