"""Models quantized by bitsandbytes, compressed-tensors and torch's FP8, and decoded by them; a part of peft_side.py."""

import json
import os
import shutil

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

BITSANDBYTES = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4-single": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}
# name -> format and QuantizationArgs.
COMPRESSED = {
    "packed": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
    "packed-zeros": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}),
    "packed-3": ("pack-quantized", {"num_bits": 3, "strategy": "channel", "symmetric": False}),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "w8a8-zeros": ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
    "float-rows": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
}
_BLOCK = 32


def quantize_folder(model, folder, form, weights):
    """Saves a model in a quantized form, and to ``weights`` its linear weights as the form's program decodes them."""
    if form in BITSANDBYTES:
        settings = BitsAndBytesConfig(**BITSANDBYTES[form])
        quantized = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, quantization_config=settings)
        quantized.save_pretrained(folder)
        decoded = dict(quantized.dequantize(dtype=torch.float32).named_parameters())
    else:
        base = load_file(os.path.join(model, "model.safetensors"))
        tensors, settings, decoded = (_fp8 if form == "fp8" else _compressed)(base, form)
        shutil.copytree(model, folder)
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
            config = {**json.load(file), "quantization_config": settings}
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        save_file(tensors, os.path.join(folder, "model.safetensors"), {"format": "pt"})
        if form == "fp8":
            # On a CPU, transformers decodes them while it loads.
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            decoded = dict(loaded.named_parameters())
    save_file({name: decoded[name].data.contiguous() for name in decoded if _is_linear(name)}, weights)


def quantized_logits(model, ids, path, adapter=None):
    """Saves the logits of a quantized model, with an adapter that PEFT loads.

    Without a gradient, bitsandbytes multiplies in bfloat16 on some processors.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter).eval()
    loaded.get_input_embeddings().weight.requires_grad_(True)
    np.save(path, loaded(torch.tensor(ids)).logits.detach().numpy())


def _is_linear(name):
    return name.endswith("_proj.weight")


def _fp8(base, _):
    tensors = {}
    for name, weight in base.items():
        tensors[name] = weight
        if _is_linear(name):
            rows, columns = weight.shape
            blocks = weight.reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
            scales = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            tensors[name], tensors[f"{name}_scale_inv"] = codes.reshape(rows, columns), scales
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]}
    return tensors, settings, None


def _compressed(base, form):
    name_of_format, arguments = COMPRESSED[form]
    arguments = QuantizationArgs(**arguments)
    activations = QuantizationArgs(num_bits=8, dynamic=True, strategy="token") if form.startswith("w8a8") else None
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(name_of_format)
    tensors, decoded = {}, {}
    for name, weight in base.items():
        if not _is_linear(name):
            tensors[name] = weight
            continue
        width = {"group": arguments.group_size, "channel": weight.shape[1], "tensor": weight.numel()}
        groups = weight.reshape(-1, width[arguments.strategy])
        shape = (1,) if arguments.strategy == "tensor" else (len(weight), -1)
        scale, zero = calculate_qparams(groups.amin(1).reshape(shape), groups.amax(1).reshape(shape), arguments)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        tensors.update({name.removesuffix("weight") + part: tensor for part, tensor in packed.items()})
        decoded[name] = compressor.decompress(packed, scheme)["weight"]
    settings = QuantizationConfig(
        config_groups={"group_0": scheme}, format=name_of_format, quantization_status="compressed", ignore=["lm_head"]
    )
    return tensors, settings.model_dump(mode="json"), decoded
