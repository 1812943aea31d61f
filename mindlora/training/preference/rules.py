"""Rules of preference training: what runner_wrapper.preference requires of the rest of a YAML and of the data."""

from typing import Any, Iterator, Mapping, Optional, Sequence

from mindlora.core.errors import ConfigError
from mindlora.core.fields import COUNT
from mindlora.core.numerics.initializers import changes_base
from mindlora.core.yaml_file import PET, value_at
from mindlora.run.checks.data_rows import FirstRows, files_of_run, pynative_files
from mindlora.run.checks.finding import Finding, error
from mindlora.run.yaml_run import WRAPPER, YamlRun
from mindlora.training.preference.settings import REFERENCE, WRITER, PreferenceSettings, preference_settings

KEY = "runner_wrapper.preference"
# The place of ``preference`` in a YAML of the PyNative Trainer.
_AT_THE_TOP = "preference"
# A column that only rows of preferences have.
ANSWERS = "answers"
# The commands that write the columns of a run, without and with the reference.
_WRITERS = ("the columns that mindlora data preference writes", "the last of which mindlora reference adds")


def check_preference(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting with which a training run cannot learn from preferences."""
    if run.preference is None or not run.trains:
        return
    try:
        settings = preference_settings(run.preference)
    except ConfigError as refusal:
        yield error(KEY, str(refusal))
        return
    if not run.steps_by_mindlora:
        yield error(
            KEY,
            f"preference is an argument of {WRAPPER}, which learns from preferences alone and in data parallel, and "
            f"runner_wrapper.type is {run.train_step}.",
            f"Set runner_wrapper.type: {WRAPPER} and parallel.parallel_mode: 0.",
        )
    yield from _check_model(run, settings)
    if run.columns is not None and list(run.columns) != list(settings.columns):
        yield error(
            "train_dataset.input_columns",
            f"train_dataset.input_columns is {run.columns}, and the loss {settings.loss} compares answers.",
            f"Write input_columns: {list(settings.columns)}, {_WRITERS[settings.precomputed_reference]}.",
        )


def _check_model(run: YamlRun, settings: PreferenceSettings) -> Iterator[Finding]:
    if run.is_mcore:
        yield from _check_mcore(run, settings)
    if run.model_config.get("input_sliced_sig"):
        yield error(
            "model.model_config.input_sliced_sig",
            "model_config.input_sliced_sig is True, but rows of preferences have one token more than seq_length.",
            "Set it to False.",
        )
    init = run.pet_config.get("lora_init")
    each_step = settings.kind.uses_reference and not settings.precomputed_reference
    if each_step and changes_base(init) and not run.pet_config.get("adapter_path"):
        yield error(
            f"{PET}.lora_init",
            f"lora_init is {init}, which takes the adapter's part out of the base, and the loss {settings.loss} "
            "compares with the base.",
            "Compute the reference before training (mindlora reference, precomputed_reference: True), use another "
            "lora_init, or a loss without a reference: simpo, orpo or cpo.",
        )


def _check_mcore(run: YamlRun, settings: PreferenceSettings) -> Iterator[Finding]:
    if run.predicted_layers:
        yield error(
            KEY,
            f"the model has {run.predicted_layers} layers that predict further tokens, but they learn labels alone.",
            "Set model.model_config.num_nextn_predict_layers: 0.",
        )
    for key in ("hidden_dropout", "attention_dropout"):
        if run.model.get(key) and settings.kind.uses_reference and not settings.precomputed_reference:
            yield error(
                f"model.model_config.{key}",
                f"model_config.{key} is {run.model[key]}, and the reference, which is computed in the same step, would "
                "be dropped out too.",
                "Set it to 0.0, or compute the reference before training (mindlora reference, precomputed_reference: "
                "True).",
            )


def check_pynative_preference(config: Mapping[str, Any], first_rows: Optional[FirstRows] = None) -> Iterator[Finding]:
    """Yields the errors of a PyNative Trainer YAML's ``preference``, or of preference data without that node.

    Args:
        config (mapping): The content of the YAML.
        first_rows (callable, optional): Reads the first rows of a MindRecord. Default: None, no row is read.
    """
    node, settings = config.get("preference"), None
    columns: Sequence[str] = ()
    if node is not None:
        try:
            settings = preference_settings(node)
        except ConfigError as refusal:
            yield error(_AT_THE_TOP, str(refusal))
            return
        # `mindlora reference` is about to add the missing columns.
        callbacks = [callback for callback in config.get("callbacks") or [] if isinstance(callback, Mapping)]
        types = [callback.get("type") for callback in callbacks]
        columns = settings.kind.columns if WRITER in types else settings.columns
        yield from _check_pynative_settings(config, settings, columns)
    length = value_at(config, "model.seq_length")
    if first_rows is None:
        return
    for where, (path, *_) in pynative_files(config):
        row = next(first_rows(path, 1), None)
        problem = _problem(row, settings, columns, _AT_THE_TOP) if row is not None else None
        if problem:
            yield error(where.split(" ")[0], f"{where}: {path} {problem[0]}", problem[1])
        elif row is not None and settings is not None and length in COUNT and row["input_ids"].shape[-1] != length + 1:
            yield error(
                "model.seq_length",
                f"model.seq_length is {length}, but the rows of {path} have {row['input_ids'].shape[-1]} tokens.",
                f"Set it to {row['input_ids'].shape[-1] - 1}, one less than the rows have.",
            )


def _check_pynative_settings(config, settings: PreferenceSettings, needed: Sequence[str]) -> Iterator[Finding]:
    columns = value_at(config, "train_dataset.dataloader.column_names")
    if columns is not None and set(columns) != set(needed):
        yield error(
            "train_dataset.dataloader.column_names",
            f"train_dataset.dataloader.column_names is {columns}, and the loss {settings.loss} compares answers.",
            f"Write column_names: {list(needed)}, {_WRITERS[REFERENCE in needed]}.",
        )
    here = "under MindFormers' PyNative Trainer"
    if value_at(config, "model.num_nextn_predict_layers"):
        found = f"The model predicts more than the next token, and preferences are learned without that {here}."
        yield error("model.num_nextn_predict_layers", found, "Set it to 0.")
    pet_config = config.get("pet_config") or {}
    others = ("adapter_path", "modules_to_save", "freeze_exclude")
    changing = [key for key in others if pet_config.get(key)]
    if changes_base(str(pet_config.get("lora_init"))):
        changing.append("lora_init")
    each_step = settings.kind.uses_reference and not settings.precomputed_reference
    for key in changing if each_step else ():
        yield error(
            f"pet_config.{key}",
            f"{key} is {pet_config[key]}, so the model that training finds is not the base with the adapter off, with "
            f"which the loss {settings.loss} compares {here}.",
            "Remove it, use a loss without a reference (simpo, orpo or cpo), or compute the reference before training "
            "(mindlora reference, precomputed_reference: True).",
        )


def check_preference_rows(run: YamlRun, first_rows: FirstRows) -> Iterator[Finding]:
    """Yields an error for each training file whose rows are not of the kind that the run learns.

    The settings must have passed the checks.
    """
    if not run.trains:
        return
    settings = None if run.preference is None else preference_settings(run.preference)
    for where, (path, *_) in files_of_run(run):
        row = next(first_rows(path, 1), None)
        columns = settings.columns if settings is not None else ()
        problem = _problem(row, settings, columns) if row is not None else None
        if problem:
            yield error(where.split(" ")[0], f"{where}: {path} {problem[0]}", problem[1])


def _problem(row, settings: Optional[PreferenceSettings], columns: Sequence[str], key: str = KEY):
    """Returns the fault of a row that must have these columns, with the remedy, or None."""
    if settings is None:
        if ANSWERS in row:
            return "holds preferences, but the run learns labels.", f"Set {key}: {{loss: dpo}}, or kto for judgments."
        return None
    missing = [column for column in columns if column not in row]
    if not missing:
        return None
    if missing == [REFERENCE]:
        return "lacks the column reference.", "Run mindlora reference on this YAML, which adds it."
    if ANSWERS in row:
        kinds = ("answers with labels", "pairs") if settings.kind.pairs else ("pairs", "answers with labels")
        return f"holds {kinds[0]}, and the loss {settings.loss} learns from {kinds[1]}.", "Choose a loss for this data."
    return f"lacks the columns {', '.join(missing)}.", "Convert the data with mindlora data preference."
