"""The reference of preference training, computed once for a MindFormers YAML and stored in its data."""

import itertools
from typing import Dict, Optional, Sequence

import mindspore as ms
from mindformers.models.build_model import build_network
from mindformers.tools.register import MindFormerConfig
from mindspore import nn

from mindlora.core.errors import ConfigError
from mindlora.data.mindrecord import first_rows
from mindlora.models.label_losses import KEY as KEY_OF_PIECES
from mindlora.models.lora_config import expand_pet_type
from mindlora.network.initialize import initialize_adapters
from mindlora.network.load_base import load_base
from mindlora.network.tree import lora_cells
from mindlora.run.checks.data_rows import check_rows, files_of_run
from mindlora.run.checks.finding import refuse
from mindlora.run.yaml_run import YamlRun
from mindlora.training.launch import hooks  # noqa: F401  importing hooks registers mindlora
from mindlora.training.launch.launcher import build_config
from mindlora.training.launch.serve import set_up_context
from mindlora.training.log import logger
from mindlora.training.model.loss_in_pieces import put_loss_in_pieces
from mindlora.training.model.network import base_of, check_loaded_base
from mindlora.training.preference.loss import preference_loss
from mindlora.training.preference.reference import add_reference, reference_fingerprint
from mindlora.training.preference.rules import KEY, check_preference
from mindlora.training.preference.settings import PreferenceSettings, preference_settings
from mindlora.training.step import lora_plus
from mindlora.training.step.packing import boundary_of, install_segment_mask


def keep_reference(config: str, overrides: Sequence[str], batch_size: Optional[int] = None) -> Dict[str, int]:
    """Adds the reference's log-probabilities to all rows on which a YAML's run trains or is evaluated.

    The reference is the network with which the run begins: the base with the adapter of pet_config, in evaluation mode.
    Each MindRecord is replaced by one with two more columns, ``reference`` and ``reference_fingerprint``; if anything
    fails, it stays unchanged. ``batch_size`` rows are computed at once, by default the batch size of training.

    Returns:
        dict of path -> number of rows.

    Raises LoraError if a setting is wrong, a file cannot be read or written, or the run has no reference.
    """
    yaml = build_config(["--config", config, *overrides])
    settings = _settings(yaml)
    paths = list(itertools.chain.from_iterable(files for _, files in files_of_run(YamlRun(yaml))))
    if not paths:
        raise ConfigError(
            "train_dataset.data_loader names no MindRecord that is there. Name the training data with "
            "--train_dataset_dir."
        )
    batch_size = batch_size or yaml.runner_config.batch_size
    boundary = boundary_of(paths)
    network = _network(yaml, batch_size)
    fingerprint = reference_fingerprint(base_of(network))
    if any(cell.awaits_initialization for _, cell in lora_cells(network)):
        initialize_adapters(base_of(network))
    if boundary is not None:
        install_segment_mask(base_of(network), boundary)
    setting = (yaml.runner_wrapper or {}).get(KEY_OF_PIECES, True)
    put_loss_in_pieces(network, setting, steps_by_mindlora=True)
    log_probabilities = preference_loss(network, settings).network
    log_probabilities.set_train(False)
    return add_reference(paths, log_probabilities, fingerprint, batch_size)


def _settings(yaml: MindFormerConfig) -> PreferenceSettings:
    node = YamlRun(yaml).preference
    if node is None:
        raise ConfigError(
            f"The YAML has no {KEY}: only preference training has a reference. Add it, such as {{loss: dpo}}."
        )
    settings = preference_settings({**node, "precomputed_reference": True})
    # Where the YAML does not say so yet, it names other columns.
    yaml.runner_wrapper.preference = MindFormerConfig(**{**node, "precomputed_reference": True})
    columns = (yaml.train_dataset or {}).pop("input_columns", None)
    run = YamlRun(yaml)
    refuse([*check_preference(run), *check_rows(run, first_rows)])
    if columns is not None:
        yaml.train_dataset.input_columns = columns
    return settings


def _network(yaml: MindFormerConfig, batch_size: int) -> nn.Cell:
    """Returns the run's initial network, without a lora_init that changes the base."""
    pet_config = yaml.model.model_config.pet_config
    if pet_config:
        expand_pet_type(pet_config)
        pet_config.pop(lora_plus.KEY, None)
    refuse(YamlRun(yaml).pet_findings)
    yaml.use_parallel = False
    set_up_context(yaml)
    node = MindFormerConfig(**yaml.model)
    node.model_config.update(batch_size=batch_size, checkpoint_name_or_path="")
    with ms.nn.utils.no_init_parameters():
        network = build_network(node)
    for note in load_base(base_of(network), yaml.load_checkpoint):
        logger.info("%s: %s", yaml.load_checkpoint, note)
    network.init_parameters_data()
    check_loaded_base(network)
    return network
