"""Preference training: what runner_wrapper.preference needs from the rest of a YAML, and from the data."""

from typing import Any, Iterator, Mapping, Optional

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.initializers import changes_base
from mindlora.core.yaml_file import PET, TRAINING_MODES, value_at
from mindlora.run.checks.data_rows import FirstRows, files_of_run
from mindlora.run.checks.finding import Finding, error
from mindlora.run.checks.mcore import is_mcore
from mindlora.run.checks.training import WRAPPER, accumulates_here, train_step
from mindlora.training.preference.settings import REFERENCE, PreferenceSettings, preference_settings

KEY = "runner_wrapper.preference"
# The column that only rows of preferences have.
ANSWERS = "answers"
# What writes the columns of a run, without the reference among them and with it.
_WRITERS = ("the columns that mindlora data preference writes", "the last of which mindlora reference adds")


def check_preference(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error for each setting that keeps a training run from learning from preferences as the YAML asks."""
    node = value_at(config, KEY)
    if node is None or config.get("run_mode") not in TRAINING_MODES:
        return
    try:
        settings = preference_settings(node)
    except ConfigError as refusal:
        yield error(KEY, str(refusal))
        return
    if train_step(config) != WRAPPER or not accumulates_here(config):
        yield error(
            KEY,
            f"preference is an argument of {WRAPPER}, which learns from preferences alone and in data parallel, and "
            f"runner_wrapper.type is {train_step(config)}.",
            f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0.",
        )
    yield from _check_model(config, settings)
    columns = value_at(config, "train_dataset.input_columns")
    if columns is not None and list(columns) != list(settings.columns):
        yield error(
            "train_dataset.input_columns",
            f"train_dataset.input_columns is {columns}, and the loss {settings.loss} compares answers.",
            f"Write input_columns: {list(settings.columns)}, {_WRITERS[settings.precomputed_reference]}.",
        )


def _check_model(config, settings: PreferenceSettings) -> Iterator[Finding]:
    if is_mcore(config):
        yield error(
            KEY,
            "use_legacy is False: preference needs the logits of every token, which an mcore model does not give to "
            "its train step.",
            "Train a legacy model, such as LlamaForCausalLM.",
        )
    if value_at(config, "model.model_config.input_sliced_sig"):
        yield error(
            "model.model_config.input_sliced_sig",
            "model_config.input_sliced_sig is True, and rows of preferences have one token more than seq_length.",
            "Set it to False.",
        )
    init = value_at(config, f"{PET}.lora_init")
    each_step = settings.kind.uses_reference and not settings.precomputed_reference
    if each_step and changes_base(init) and not value_at(config, f"{PET}.adapter_path"):
        yield error(
            f"{PET}.lora_init",
            f"lora_init is {init}, which takes the adapter's part out of the base, and the loss {settings.loss} "
            "compares with the base.",
            "Compute the reference before training (mindlora reference, precomputed_reference: True), use another "
            "lora_init, or a loss without a reference: simpo, orpo or cpo.",
        )


def check_preference_rows(config: Mapping[str, Any], first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error for each file of a training run that holds preferences where labels are learned, or labels where
    preferences are, or preferences of another kind. The settings must have no mistakes.
    """
    if config.get("run_mode") not in TRAINING_MODES:
        return
    node = value_at(config, KEY)
    settings = None if node is None else preference_settings(node)
    for where, (path, *_) in files_of_run(config):
        row = next(first_rows(path, 1), None)
        problem = _problem(row, settings) if row is not None else None
        if problem:
            yield error(where.split(" ")[0], f"{where}: {path} {problem[0]}", problem[1])


def _problem(row, settings: Optional[PreferenceSettings]):
    """Returns what is wrong with the columns of a row, and what to do, or None."""
    if settings is None:
        if ANSWERS in row:
            return "holds preferences, and the run learns labels.", f"Set {KEY}: {{loss: dpo}}, or kto for judgments."
        return None
    missing = [column for column in settings.columns if column not in row]
    if not missing:
        return None
    if missing == [REFERENCE]:
        return "lacks the column reference.", "Run mindlora reference on this YAML, which adds it."
    if ANSWERS in row:
        kinds = ("answers with labels", "pairs") if settings.kind.pairs else ("pairs", "answers with labels")
        return f"holds {kinds[0]}, and the loss {settings.loss} learns from {kinds[1]}.", "Choose a loss for this data."
    return f"lacks the columns {', '.join(missing)}.", "Convert the data with mindlora data preference."
