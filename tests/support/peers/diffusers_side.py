"""diffusers' loaders of Stable Diffusion adapters on tiny random models; part of the process of peft_side.py."""

import os

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file

UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 12,
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}
TEXT = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 30,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
XL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "attention_head_dim": (5, 10, 20),
}
TIME = 7
WEIGHTS = "pytorch_lora_weights.safetensors"
SIZES = {"sd": {"cross_attention_dim": 768}, "xl": XL}


def models():
    """Returns a UNet and a text encoder with random weights, always the same."""
    from diffusers import UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    return UNet2DConditionModel(**UNET).eval(), CLIPTextModel(CLIPTextConfig(**TEXT)).eval()


def save_diffusion(folder, form, alphas=None, dropout=0.0):
    """Saves a random adapter of both models as diffusers or kohya's converter does, or a UNet's by itself.

    Args:
        folder (str): Where to write pytorch_lora_weights.safetensors.
        form (str): "diffusers", "old" (lora.down and lora.up), "unet" or "kohya".
        alphas (dict): alpha_pattern of the UNet, whose ranks are then mixed too; only settings can say it, so for
            "diffusers" and "unet". Default: None.
        dropout (float): lora_dropout.
    """
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_kohya

    unet, text = models()
    targets, clip_targets = ["to_q", "to_out.0"], ["q_proj", "out_proj"]
    if form != "old":  # Attention alone: diffusers reads no file in which older keys and PEFT's are mixed.
        targets += ["conv1", "proj_in", "ff.net.0.proj", "time_emb_proj", "conv_in"]
        clip_targets += ["fc1"]
    ranks = {"conv1": 3, "ff.net.0.proj": 2} if alphas else {}
    unet.add_adapter(
        LoraConfig(
            r=4,
            lora_alpha=4,
            target_modules=targets,
            rank_pattern=ranks,
            alpha_pattern=alphas or {},
            lora_dropout=dropout,
        )
    )
    text.add_adapter(LoraConfig(r=2, lora_alpha=2 if form != "diffusers" else 3, target_modules=clip_targets))
    for model in (unet, text):
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn_like(parameter)
    if form == "unet":
        unet.save_lora_adapter(folder)
        return
    layers = [get_peft_model_state_dict(model, adapter_name="default") for model in (unet, text)]
    if form == "kohya":
        joined = {
            f"{part}.{key}": value
            for part, found in zip(("unet", "text_encoder"), layers)
            for key, value in found.items()
        }
        # Only the level that CLIP had before says whose the names are.
        joined = {
            key.replace("text_encoder.encoder.", "text_encoder.text_model.encoder."): value
            for key, value in joined.items()
        }
        os.makedirs(folder, exist_ok=True)
        flat = {key: value.contiguous() for key, value in convert_state_dict_to_kohya(joined).items()}
        save_file(flat, os.path.join(folder, "kohya.safetensors"))
        return
    settings = (
        [model.peft_config["default"].to_dict() for model in (unet, text)] if form == "diffusers" else [None, None]
    )
    if form == "old":
        layers = [convert_state_dict_to_diffusers(found) for found in layers]
    Loader.save_lora_weights(
        folder,
        unet_lora_layers=layers[0],
        text_encoder_lora_layers=layers[1],
        unet_lora_adapter_metadata=settings[0],
        text_encoder_lora_adapter_metadata=settings[1],
    )


def diffusion_outputs(path, adapter=None, prefix="unet", inputs=None):
    """Saves what UNet and text encoder compute with an adapter that diffusers or PEFT reads; and the inputs."""
    from diffusers.loaders import StableDiffusionLoraLoaderMixin as Loader

    unet, text = models()
    if adapter and prefix == "peft":
        unet = PeftModel.from_pretrained(unet, adapter)
    elif adapter and prefix is None:
        unet.load_lora_adapter(adapter, prefix=None, weight_name=WEIGHTS)
    elif adapter:
        state, alphas, settings = Loader.lora_state_dict(adapter, return_lora_metadata=True)
        Loader.load_lora_into_unet(state, alphas, unet, metadata=settings)
        Loader.load_lora_into_text_encoder(state, alphas, text, metadata=settings)
    for model in (unet, text):
        model.eval()  # The dropout of an adapter is new.
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        words = text(torch.arange(6).reshape(1, 6) + 3).last_hidden_state
        picture = torch.randn(1, 4, 8, 8, generator=rng)
        context = torch.randn(1, 6, 12, generator=rng)
        noise = unet(picture, TIME, context).sample
    if inputs:
        np.savez(inputs, picture=picture.numpy(), context=context.numpy())
    np.savez(path, words=words.numpy(), noise=noise.numpy())


def diffusion_weights(path):
    """Saves the weights of the UNet."""
    np.savez(path, **{name: weight.numpy() for name, weight in models()[0].state_dict().items()})


def diffusion_cells(size):
    """Returns the paths of all linear cells and convolutions of a real UNet, which is not given any weights."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        unet = UNet2DConditionModel(**SIZES[size])
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    return sorted(path for path, module in unet.named_modules() if isinstance(module, kinds))


def original_names(keys):
    """Returns what diffusers makes of names in kohya's form, for a UNet with two resnets in each block."""
    import types

    from diffusers.loaders.lora_conversion_utils import (
        _convert_non_diffusers_lora_to_diffusers,
        _maybe_map_sgm_blocks_to_diffusers,
    )
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    state = {f"{key}.{part}.weight": torch.ones(1) for key in keys for part in ("lora_down", "lora_up")}
    state = {**{key: value * index for index, (key, value) in enumerate(state.items())}}
    order = {int(value.item()): key for key, value in state.items()}
    state = _maybe_map_sgm_blocks_to_diffusers(state, types.SimpleNamespace(layers_per_block=2))
    state, _ = _convert_non_diffusers_lora_to_diffusers(state)
    found = convert_unet_state_dict_to_peft(state)
    return {order[int(value.item())]: key for key, value in found.items()}
