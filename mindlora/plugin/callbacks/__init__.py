"""The callbacks that a YAML can name, one file each; importing this package registers them all in MindFormers."""

from mindlora.plugin.callbacks.adapter_health import AdapterHealth
from mindlora.plugin.callbacks.held_out_loss import HeldOutLoss
from mindlora.plugin.callbacks.lora_checkpoint import LoraCheckpoint
from mindlora.plugin.callbacks.lora_initialization import LoraInitialization, LoraStart
from mindlora.plugin.callbacks.loss_curve import LossCurve
from mindlora.plugin.callbacks.progress_bar import ProgressBar
from mindlora.plugin.callbacks.run_report import RunReport

__all__ = [
    "AdapterHealth",
    "HeldOutLoss",
    "LoraCheckpoint",
    "LoraInitialization",
    "LoraStart",
    "LossCurve",
    "ProgressBar",
    "RunReport",
]
