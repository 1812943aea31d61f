"""The fused operators of LoRA. ops/<operator>/README.md in the repository defines each."""

from mindlora.core.numerics.nf4 import Nf4Array, dequantize, quantize
from mindlora.ops.backend import BackendReport, Choice, backend_report
from mindlora.ops.lora_delta import LoraDelta, lora_delta
from mindlora.ops.lora_linear import LoraLinear, LoraLinearWithBias, lora_linear
from mindlora.ops.multi_lora_delta import MultiLoraDelta, multi_lora_delta
from mindlora.ops.multi_lora_linear import MultiLoraLinear, MultiLoraLinearWithBias
from mindlora.ops.multi_lora_slot_write import MultiLoraSlotWrite, multi_lora_slot_write, pack_adapter
from mindlora.ops.nf4_linear import Nf4Linear, Nf4LinearWithBias, nf4_linear

__all__ = [
    "BackendReport",
    "Choice",
    "LoraDelta",
    "LoraLinear",
    "LoraLinearWithBias",
    "MultiLoraDelta",
    "MultiLoraLinear",
    "MultiLoraLinearWithBias",
    "MultiLoraSlotWrite",
    "Nf4Array",
    "Nf4Linear",
    "Nf4LinearWithBias",
    "backend_report",
    "dequantize",
    "lora_delta",
    "lora_linear",
    "multi_lora_delta",
    "multi_lora_slot_write",
    "nf4_linear",
    "pack_adapter",
    "quantize",
]
