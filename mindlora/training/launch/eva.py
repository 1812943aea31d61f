"""EVA for a MindFormers YAML: computes the initial adapter from its model, base, pet_config and training data."""

import itertools
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import numpy as np
from mindformers.models.build_model import build_network
from mindformers.tools.register import MindFormerConfig

from mindlora.core.errors import ConfigError
from mindlora.core.fields import ignore_token_id, pad_token_id
from mindlora.core.formats.mindrecord_files import mindrecord_files
from mindlora.data.mindrecord import first_rows
from mindlora.models.lora_config import LoraConfig
from mindlora.network.eva import Batch, EvaResult, eva_adapter
from mindlora.network.load_base import load_base
from mindlora.run.checks.cpu import dtype_key, held_dtype
from mindlora.run.checks.data_rows import BOUNDARY, model_of
from mindlora.run.checks.finding import refuse
from mindlora.run.checks.mcore import check_mcore
from mindlora.run.keys import MODEL
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch.launcher import build_config
from mindlora.training.launch.serve import set_up_context
from mindlora.training.log import logger
from mindlora.training.model.mcore_cpu_cells import use_mcore_cpu_cells


def eva_of(config: str, overrides: Sequence[str], rows: int, batch_size: int, rho: float, tau: float) -> EvaResult:
    """Returns eva_adapter's result for a YAML, from the first ``rows`` rows of its data, ``batch_size`` at a time.

    Raises LoraError if a setting is wrong, or a file cannot be read.
    """
    yaml = build_config(["--config", config, *overrides])
    run = YamlRun(yaml)
    lora = _lora_config(run)
    held = held_dtype(run)
    if held is not None:
        raise ConfigError(
            f"The base is in {held}, and on a CPU EVA computes its activations in float32: add "
            f"--{MODEL}.{dtype_key(run)} float32 to this command. The adapter works with either dtype."
        )
    batches = batches_of(run, rows, batch_size)
    yaml.use_parallel = False
    if not run.is_mcore:
        yaml.context.mode = 1
    set_up_context(yaml)
    node = MindFormerConfig(**{**yaml.model, "model_config": model_of(run)})
    node.model_config.pop("pet_config")
    node.model_config.update(batch_size=batch_size, checkpoint_name_or_path="")
    network = build_network(node)
    if run.is_mcore:
        use_mcore_cpu_cells(network)
    for note in load_base(network, yaml.load_checkpoint):
        logger.info("%s: %s", yaml.load_checkpoint, note)
    return eva_adapter(network, batches, lora, rho, tau)


def _lora_config(run: YamlRun) -> LoraConfig:
    refuse([*run.pet_findings, *check_mcore(run)])
    if run.lora is None:
        raise ConfigError("The YAML has no pet_config of mindlora: add one, whose ranks and cells the adapter gets.")
    return run.lora


def batches_of(run: YamlRun, rows: int, batch_size: int) -> List[Batch]:
    """Returns the first ``rows`` rows of a run's training data in the form that eva_adapter takes.

    Raises ConfigError if there is no data, or its rows are packed or too short.
    """
    files = mindrecord_files(run.train_data or [])
    if not files:
        raise ConfigError(
            "train_dataset.data_loader names no MindRecord that is there. Name the training data with "
            "--train_dataset_dir."
        )
    model = model_of(run)
    length = model["seq_length"]
    read = itertools.islice(itertools.chain.from_iterable(first_rows(file, rows) for file in files), rows)
    batches = []
    for chunk in _chunks(read, batch_size):
        tokens = np.stack([_column(row, "input_ids", length) for row in chunk])
        labels = np.stack([_column(row, "labels", length) for row in chunk])
        ignored = ignore_token_id(model)
        if run.is_mcore and len(chunk[0]["input_ids"]) == length and "labels" in chunk[0]:
            # Label i of such a row is token i + 1, so it does not say whether the first token counts.
            labels = np.pad(labels[:, :-1], ((0, 0), (1, 0)), constant_values=ignored)
        counted = (labels != ignored) & (tokens != pad_token_id(model))
        batches.append((tokens.astype(np.int32), counted))
    return batches


def _chunks(rows: Iterator[Dict[str, np.ndarray]], size: int) -> Iterator[List[Dict[str, np.ndarray]]]:
    while chunk := list(itertools.islice(rows, size)):
        if BOUNDARY in chunk[0]:
            raise ConfigError(
                "The rows of train_dataset are packed, and EVA reads whole rows. Convert the data without packing, "
                "and name that file with --train_dataset_dir."
            )
        yield chunk


def _column(row: Mapping[str, Any], name: str, length: int) -> np.ndarray:
    # The doctor also reports data without labels and rows that are too long or too short.
    values = row.get(name, row["input_ids"])
    if len(values) < length:
        raise ConfigError(
            f"A row of train_dataset has {len(values)} tokens, but seq_length is {length}. Set --seq_length "
            f"{len(values)} at most."
        )
    return values[:length]
