"""EVA for a YAML of MindFormers' PyNative Trainer, which builds the model, loads the base, and ends before a step."""

import dataclasses
import re
from typing import Any, Dict, Mapping, Sequence

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.network.eva import EvaResult, eva_adapter
from mindlora.network.merge import without_adapters
from mindlora.run.checks.data_rows import pynative_files
from mindlora.training.launch import pynative_run
from mindlora.training.launch.command_line import parse
from mindlora.training.launch.eva import batches_of_files
from mindlora.training.pynative.initialization import configuration_of

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402
from mindformers.pynative.callback import TrainerCallback  # noqa: E402

_READER = "EvaReader"


class _Computed(Exception):
    """Ends a Trainer before its first step, when the adapter has been computed."""

    def __init__(self, result: EvaResult):
        super().__init__()
        self.result = result


class EvaReader(TrainerCallback):
    """Computes EVA's adapter for the model with which a run begins, and ends the run.

    Args:
        files (sequence of str): The MindRecords of the training data.
        rows (int): How many rows are read at most.
        batch_size (int): Rows that are read at once.
        rho, tau (float): As for eva_adapter.
    """

    def __init__(self, files: Sequence[str], rows: int, batch_size: int, rho: float, tau: float):
        self.files, self.rows, self.batch_size = files, rows, batch_size
        self.rho, self.tau = rho, tau

    def on_train_begin(self, args: Any, state: Any, model: Sequence[nn.Cell] = (), **kwargs: Any) -> None:
        """Raises _Computed."""
        (network,) = model
        gpt = next(cell for _, cell in network.cells_and_names() if isinstance(cell, GPTModel))
        special = gpt.ignore_token_id, gpt.pad_token_id
        batches = batches_of_files(self.files, self.rows, self.batch_size, gpt.seq_length, special, True)
        config = configuration_of(network)
        if config is None:
            raise ConfigError("pet_config has adapters, and EVA makes one. Leave them out to compute it.")
        without_adapters(network)
        network.register_forward_pre_hook(_with_labels, with_kwargs=True)
        raise _Computed(eva_adapter(network, batches, config, self.rho, self.tau))


def _with_labels(_: nn.Cell, inputs: Any, keywords: Any) -> Any:
    """Gives a model, which makes logits of tokens with labels alone, the tokens as labels."""
    (tokens,) = inputs
    return (), {**keywords, "input_ids": tokens, "labels": tokens}


MindFormerRegister.register_cls(EvaReader, MindFormerModuleType.CALLBACK, alias=_READER)


def eva_of(config: str, overrides: Sequence[str], rows: int, batch_size: int, rho: float, tau: float) -> EvaResult:
    """Does what eva_of of graph mode does, for a YAML of the PyNative Trainer; as that one.

    The keys of the result are nodes of the YAML: pet_config, and lora_config if a cell gets no adapter.
    """
    content = pynative_run.build_config(*parse(["--config", config, "--mode", "1", *overrides]))
    files = [path for where, paths in pynative_files(content) for path in paths if where.startswith("train_dataset")]
    if not files:
        raise ConfigError(
            "train_dataset.dataloader names no MindRecord that is there. Name the training data with "
            "--train_dataset.dataloader.dataset_files."
        )
    content["callbacks"] = [
        {"type": _READER, "files": files, "rows": rows, "batch_size": batch_size, "rho": rho, "tau": tau}
    ]
    content["checkpoint"] = {**(content.get("checkpoint") or {}), "enable_save": False}
    # Else the head would be one that hands on what it reads.
    content["pet_config"] = {**(content.get("pet_config") or {}), "loss_in_pieces": False}
    try:
        pynative_run.make_trainer(content).train()
    except _Computed as computed:
        return dataclasses.replace(computed.result, keys=_keys(content["lora_config"], computed.result))
    raise ConfigError(f"MindFormers' Trainer ended before it called {_READER}: its log says why. Correct that.")


def _keys(lora_config: Mapping[str, Any], result: EvaResult) -> Dict[str, Any]:
    pet_config = {key: value for key, value in result.keys.items() if key != "exclude_modules"}
    without = [re.escape(path) for path, rank in result.ranks.items() if not rank]
    if not without:
        return {"pet_config": pet_config}
    before = lora_config.get("exclude_layers")
    return {"pet_config": pet_config, "lora_config": {"exclude_layers": "|".join(filter(None, [before, *without]))}}
