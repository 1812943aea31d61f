"""Packed data under the PyNative Trainer: what keeps the examples of a row apart."""

from typing import Any

from mindspore import nn
from mindspore.mint.distributed import get_world_size

from mindlora.core.errors import ConfigError
from mindlora.core.mindformers_version import require_mindformers
from mindlora.training.log import logger
from mindlora.training.step.packing import boundary_of
from mindlora.training.step.segment_mask import SegmentMask

require_mindformers("2.0")
from mindformers.pynative.base_models.gpt.gpt_model import GPTModel  # noqa: E402

# Settings under which the model does not make its mask from its tokens.
_WITHOUT_A_MASK = ("use_attn_mask_compression", "use_eod_attn_mask_compression")


def keep_examples_apart(model: nn.Cell, settings: Any) -> None:
    """Makes a model keep the examples of a row apart (see SegmentMask), in place, if the training data is packed.

    Raises ConfigError if a setting keeps it from using a mask made from its tokens, or the run has several processes.
    """
    data = settings.train_dataset.dataloader.to_dict().get("dataset_files")
    boundary = boundary_of(data) if data else None
    if boundary is None:
        return
    gpt = next(cell for _, cell in model.cells_and_names() if isinstance(cell, GPTModel))
    obstacles = [f"model.{key} is True" for key in _WITHOUT_A_MASK if getattr(gpt.config, key, False)]
    if get_world_size() > 1:
        obstacles.append(f"the run has {get_world_size()} processes")
    if obstacles:
        raise ConfigError(
            f"train_dataset is packed, and {obstacles[0]}: mindlora then cannot keep the examples of a row apart under "
            "MindFormers' PyNative Trainer. Change that, or convert the data without --pack."
        )
    gpt.casual_mask = SegmentMask(gpt.casual_mask, boundary)
    logger.info("The training data is packed: token %d begins an example of a row.", boundary)
