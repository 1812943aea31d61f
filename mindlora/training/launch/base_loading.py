"""Lets BaseWeights load the base, tensor by tensor, where it can, and not MindFormers."""

import contextlib

from mindformers.tools.register import MindFormerConfig
from mindspore.nn.utils import no_init_parameters

from mindlora.run.checks.base_loading import loads_by_tensor
from mindlora.run.checks.mcore import is_mcore


def take_base_over(config: MindFormerConfig) -> contextlib.AbstractContextManager:
    """Lets BaseWeights load the base, where it can; returns what the run has to be in.

    Then load_checkpoint is empty for MindFormers, and what is built in the context has no values until they are loaded;
    an mcore model, whose parameters hold more than weights, is built with values.
    """
    if not config.load_checkpoint or not loads_by_tensor(config):
        return contextlib.nullcontext()
    callbacks = config.callbacks or []
    config.callbacks = [MindFormerConfig(type="BaseWeights", path=config.load_checkpoint), *callbacks]
    config.load_checkpoint = ""
    config.auto_trans_ckpt = False
    return contextlib.nullcontext() if is_mcore(config) else no_init_parameters()
