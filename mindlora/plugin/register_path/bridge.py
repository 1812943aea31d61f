"""What ``auto_register: bridge.LlamaConfig`` imports, to bring mindlora under MindFormers' own run_mindformer.py.

It stands under model.model_config, the node that MindFormers builds before the network, so that mindlora is there
when pet_config is read. MindFormers copies this file elsewhere before it imports it, hence absolute imports alone.
"""

from mindformers.models.llama import LlamaConfig as MindFormersLlamaConfig

from mindlora.plugin import hooks  # noqa: F401  registers pet type, train step and callbacks
from mindlora.plugin.preflight import check_pet_config


class LlamaConfig(MindFormersLlamaConfig):
    """MindFormers' LlamaConfig, with pet_config checked: MindFormers itself trains the whole network on a typo."""

    def __init__(self, *args, pet_config=None, **kwargs):
        if pet_config:
            check_pet_config(pet_config)
        super().__init__(*args, pet_config=pet_config, **kwargs)
