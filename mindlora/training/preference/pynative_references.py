"""The reference of preference training, computed once by MindFormers' PyNative Trainer and stored in the data."""

from typing import Any, Dict, Optional, Sequence

from mindformers.tools.register import MindFormerModuleType, MindFormerRegister
from mindspore import nn

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.core.yaml_file import value_at
from mindlora.run.checks.data_rows import pynative_files
from mindlora.training.launch import pynative_run
from mindlora.training.launch.command_line import parse
from mindlora.training.preference.pynative import pynative_preference_loss
from mindlora.training.preference.reference import add_reference
from mindlora.training.preference.settings import WRITER, preference_settings
from mindlora.training.pynative.evaluation import EvaluatedModel
from mindlora.training.pynative.initialization import preference_of, reference_of

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402
from mindformers.pynative.callback import TrainerCallback  # noqa: E402

_LOADER = "train_dataset.dataloader"


class _Kept(Exception):
    """Raised to end a Trainer before its first step, when the data has the reference."""

    def __init__(self, counts: Dict[str, int]):
        super().__init__()
        self.counts = counts


class ReferenceWriter(TrainerCallback):
    """Adds the initial model's log-probabilities to the run's data, and ends the run.

    Args:
        files (sequence of str): The MindRecords.
        batch_size (int): Rows computed at once.
    """

    def __init__(self, files: Sequence[str], batch_size: int):
        self.files = files
        self.batch_size = batch_size

    def on_train_begin(self, args: Any, state: Any, model: Sequence[nn.Cell] = (), **kwargs: Any) -> None:
        """Writes the reference, then raises _Kept."""
        (network,) = model
        gpt = next(cell for _, cell in network.cells_and_names() if isinstance(cell, GPTModel))
        loss = pynative_preference_loss(EvaluatedModel(network, gpt), preference_of(network))
        loss.network.set_train(False)
        raise _Kept(add_reference(self.files, loss.network, reference_of(network), self.batch_size))


MindFormerRegister.register_cls(ReferenceWriter, MindFormerModuleType.CALLBACK, alias=WRITER)


def keep_reference(config: str, overrides: Sequence[str], batch_size: Optional[int] = None) -> Dict[str, int]:
    """Stores the reference for a YAML of the PyNative Trainer, like keep_reference of graph mode."""
    content = pynative_run.build_config(*parse(["--config", config, "--mode", "1", *overrides]))
    node = content.get("preference")
    if not node:
        raise ConfigError(
            "The YAML has no preference: only preference training has a reference. Add it, such as {loss: dpo}."
        )
    checkpoint = content.get("checkpoint") or {}
    if checkpoint.get("load_path") and not checkpoint.get("no_load_optim"):
        raise ConfigError(
            f"With checkpoint.load_path {checkpoint['load_path']} and without no_load_optim, a run goes on, and its "
            "reference is that with which it began. Name the base, and set checkpoint.no_load_optim: True."
        )
    settings = preference_settings({**node, "precomputed_reference": True})
    content["preference"] = {**node, "precomputed_reference": True}
    paths = [path for _, files in pynative_files(content) for path in files]
    if not paths:
        raise ConfigError(
            f"{_LOADER} names no MindRecord that is there. Name the training data with --{_LOADER}.dataset_files."
        )
    # If the YAML does not set it yet, it names other columns.
    value_at(content, _LOADER)["column_names"] = list(settings.kind.columns)
    rows = batch_size or value_at(content, "training.local_batch_size") or 1
    content["callbacks"] = [{"type": WRITER, "files": paths, "batch_size": rows}]
    content["checkpoint"] = {**checkpoint, "enable_save": False}
    try:
        pynative_run.make_trainer(content).train()
    except _Kept as kept:
        return kept.counts
    raise ConfigError(f"MindFormers' Trainer ended before it called {WRITER}: its log says why. Correct the cause.")
