"""Rows that MindFormers' own loaders pack as they read them: what the YAML must say so that examples stay apart."""

from typing import Any, Iterator, List, Mapping

from mindlora.core.run_modes import TRAINING_MODES
from mindlora.core.text import shown
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.checks.mcore import is_mcore

_LOADER = "train_dataset.data_loader"
_PACKING_LOADERS = ("HFDataLoader", "CommonDataLoader")
_PACKER = "PackingHandler"
_SHORTEST = 2048


def check_packing(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields what MindFormers refuses in a run whose loader packs rows, and a warning if examples see each other."""
    yield from _check_length(config)
    kind = value_at(config, f"{_LOADER}.type")
    packs = kind in _PACKING_LOADERS and _PACKER in _handlers(config)
    if config.get("run_mode") not in TRAINING_MODES or not (packs or kind == "BlendedMegatronDatasetDataLoader"):
        return
    sliced = value_at(config, "model.model_config.input_sliced_sig")
    if not sliced and not is_mcore(config):
        yield error(
            "model.model_config.input_sliced_sig",
            f"{_LOADER}.type is {kind}, whose labels are shifted already, and model_config.input_sliced_sig is "
            f"{shown(sliced)}.",
            "Set it to True.",
        )
    columns = value_at(config, "train_dataset.input_columns")
    # Without the key, MindFormers takes all columns.
    if packs and columns and not {"attention_mask", "actual_seq_len"} & set(columns):
        ends = bool(value_at(config, f"{_LOADER}.create_compressed_eod_mask"))
        column = "actual_seq_len" if ends else "attention_mask"
        more = "" if ends else ", or set create_compressed_eod_mask: True and add actual_seq_len"
        yield warning(
            "train_dataset.input_columns",
            f"{_LOADER} packs examples ({_PACKER}), and train_dataset.input_columns lacks the column that keeps them "
            f"apart, so the examples of a row see each other: {', '.join(map(str, columns))}.",
            f"Add {column} to input_columns and construct_args_key, and its part to parallel.dataset_strategy{more}.",
        )


def _check_length(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields an error if rows are too short for the compressed mask that flash attention is given."""
    keys = ["model.model_config.use_attn_mask_compression"]
    if is_mcore(config):
        keys += ["model.model_config.use_eod_attn_mask_compression", f"{_LOADER}.create_compressed_eod_mask"]
    compressing = [key for key in keys if value_at(config, key)]
    length = value_at(config, "model.model_config.seq_length")
    if compressing and isinstance(length, int) and length < _SHORTEST and config.get("run_mode") in TRAINING_MODES:
        yield error(
            compressing[0],
            f"{compressing[0]} is True and model_config.seq_length is {length}: MindFormers compresses masks of at "
            f"least {_SHORTEST} tokens.",
            f"Set {compressing[0].rpartition('.')[2]}: False, or seq_length: {_SHORTEST}.",
        )


def _handlers(config: Mapping[str, Any]) -> List[Any]:
    handlers = value_at(config, f"{_LOADER}.handler")
    return [one.get("type") for one in handlers if isinstance(one, Mapping)] if isinstance(handlers, list) else []
