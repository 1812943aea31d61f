"""The module for ``auto_register: bridge.LlamaConfig``, to use mindlora under MindFormers' run_mindformer.py.

This setting belongs under model.model_config, which MindFormers builds before the network, so that mindlora is loaded
when pet_config is read. MindFormers copies this file elsewhere before importing it, hence the absolute imports.
"""

from typing import Mapping, Optional

from mindformers.models.llama import LlamaConfig as MindFormersLlamaConfig

from mindlora.run.checks.pet_config import refuse_pet_config
from mindlora.training.launch import hooks  # noqa: F401  importing it registers pet type, train step and callbacks


class LlamaConfig(MindFormersLlamaConfig):
    """MindFormers' LlamaConfig with a check of pet_config: on a typo there, MindFormers trains the complete network."""

    def __init__(self, *args, pet_config: Optional[Mapping] = None, **kwargs):
        if pet_config:
            refuse_pet_config(pet_config)
        super().__init__(*args, pet_config=pet_config, **kwargs)
