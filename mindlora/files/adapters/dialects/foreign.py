"""Forms that are recognized and cannot be read: their origin, and the way to a form that can be read."""

import os
import re
from typing import Iterator, List, NamedTuple, NoReturn, Tuple

from mindlora.core.errors import AdapterFormatError
from mindlora.core.git_lfs import refuse_pointer
from mindlora.files.adapters.dialects.dialect import listed_keys
from mindlora.models.variants.registry import PYNATIVE_STACKED

_GGUF = b"GGUF"
# How deep, and into how many folders, to look for an adapter below a folder.
_DEPTH = 3
_FOLDERS = 1000


class Foreign(NamedTuple):
    """A form that is recognized and not read.

    Attributes:
        advice (str): One sentence on what to do.
        keys (str): Regular expression that a key of such a file matches; "" if its keys do not identify it.
        files (str): Regular expression for its name, or for the name of a file in such a folder.
    """

    name: str
    advice: str
    keys: str = ""
    files: str = ""


_LYCORIS = "Merge it into its base with the program that trained it; mindlora reads kohya's plain LoRA and LoCon."
_OTHER_DIFFUSION = "Load it with diffusers; mindlora reads adapters of Stable Diffusion 1, 2 and XL."
_MEGATRON = "Export it as a PEFT folder with its AutoBridge.export_adapter_ckpt(peft_checkpoint, output_path)."
_NEMO = "Export it as a PEFT folder with nemo's llm.export_ckpt(..., target='hf-peft')."
_MINDSPEED = "Convert it with MindSpeed-LLM's convert_ckpt.py --save-lora-to-hf, or merge it with --lora-load."
_TORCHTUNE = "Give the folder of torchtune's output that holds adapter_model.safetensors, which is in PEFT's form."
_LITGPT = "Merge it with `litgpt merge_lora` and convert the result with `litgpt convert_from_litgpt`."
_GGUF_WAY = "Give the PEFT folder that llama.cpp's convert_lora_to_gguf.py made it from."
_RANKS = (
    "Join the slices of a sharded run with mindlora adapter gather; of a data-parallel run, give the file of one rank."
)
_MLX_WAY = "Train or save it with a version of mlx-lm that writes adapters.safetensors."
_SEVERAL = "Give the folder of one of them, as LoraCheckpoint has written it: NAME/lora_checkpoint/step_N."

FOREIGN = (
    Foreign("a checkpoint of several adapters that train in one run", _SEVERAL, rf"\.{PYNATIVE_STACKED['A']}$"),
    Foreign("a LoHa adapter of LyCORIS", _LYCORIS, r"\.hada_(w[12]|t[12])"),
    Foreign("a LoKr adapter of LyCORIS", _LYCORIS, r"\.lokr_"),
    Foreign("an IA3 adapter of LyCORIS", _LYCORIS, r"^lora_.*\.on_input$|\.ia3_l$"),
    Foreign("an OFT adapter of kohya or LyCORIS", _LYCORIS, r"\.oft_(blocks|diag)$"),
    Foreign("a GLoRA adapter of LyCORIS", _LYCORIS, r"^lora_[^.]*\.[ab][12]\.weight$"),
    Foreign("an adapter of LyCORIS with weights trained in full", _LYCORIS, r"^lora_[^.]*\.(diff|diff_b|[wb]_norm)$"),
    Foreign("a DoRA adapter in kohya's form, whose norms LyCORIS takes in its own way", _LYCORIS, r"\.dora_scale$"),
    Foreign("an adapter with a textual inversion in it", "Save it without bundled embeddings.", r"^bundle_emb\."),
    Foreign(
        "a Flux adapter", _OTHER_DIFFUSION, r"(^|[._])(double_blocks|single_blocks|single_transformer_blocks)[._]\d"
    ),
    Foreign(
        "a Wan adapter",
        _OTHER_DIFFUSION,
        r"^(diffusion_model|transformer|lora_unet|model)[._]blocks[._]\d.*(self|cross)_?attn",
    ),
    Foreign("an adapter of Stable Diffusion 3", _OTHER_DIFFUSION, r"(^|[._])joint_blocks[._]\d|^lora_te3_"),
    Foreign("a Control-LoRA", _OTHER_DIFFUSION, r"^lora_controlnet$"),
    Foreign(
        "an adapter of a diffusion model other than Stable Diffusion",
        _OTHER_DIFFUSION,
        r"^(transformer\.\w*blocks|diffusion_model|prior|controlnet|text_encoder_3)\..*lora|^lora_(transformer|prior|unet_blocks|unet_layers)_",
    ),
    Foreign("torchtune's checkpoint", _TORCHTUNE, r"^layers\.\d+\..*\.lora_[ab]\.weight$", r"^adapter_\d+\.pt$"),
    Foreign("lit-gpt's adapter", _LITGPT, r"\.lora_[AB]$", r"(\.lora\.pth|\.pth\.lora)$"),
    Foreign("NeMo's adapter", _NEMO, r"\.adapter_layer\.", r"\.nemo$"),
    Foreign("Megatron-Bridge's or NeMo 2's adapter", _MEGATRON, r"\.adapter\.linear_(in|out)\.weight$", r"\.distcp$"),
    Foreign(
        "MindSpeed-LLM's or Megatron's checkpoint",
        _MINDSPEED,
        files=r"^model_optim_rng\.pt$|^latest_checkpointed_iteration\.txt$",
    ),
    Foreign("a GGUF file", _GGUF_WAY, files=r"\.gguf$"),
    Foreign("an adapter of an old mlx-lm", _MLX_WAY, files=r"^adapters\.npz$"),
    Foreign("a folder with the checkpoints of several ranks", _RANKS, files=r"^rank_[1-9]\d*$"),
)


def refuse_keys(keys: List[str], path: str) -> None:
    """Raises AdapterFormatError if the keys of a file are of a known form that is not read."""
    for form in FOREIGN:
        if form.keys and any(re.search(form.keys, key) for key in keys):
            _refuse(form, path)


def refuse_file(path: str) -> None:
    """Raises AdapterFormatError if the name or the first bytes of a file are of a known form that is not read."""
    refuse_pointer(path, AdapterFormatError)
    with open(path, "rb") as file:
        begin = file.read(len(_GGUF))
    name = "adapter.gguf" if begin.startswith(_GGUF) else os.path.basename(path)
    for form in FOREIGN:
        if form.files and re.search(form.files, name):
            _refuse(form, path)


def refuse_folder(folder: str, names: List[str], weights: Tuple[str, ...]) -> NoReturn:
    """Raises AdapterFormatError for a folder without an adapter: says what it is, or where one lies below it."""
    for form in FOREIGN:
        if form.files and any(re.search(form.files, name) for name in names):
            _refuse(form, folder)
    below = list(_adapters_below(folder, weights))
    if len(below) == 1:
        raise AdapterFormatError(f"{folder} holds no adapter itself, but there is one below it: give {below[0]}.")
    if below:
        raise AdapterFormatError(
            f"{folder} holds no adapter itself, but there are {len(below)} below it. Give one of them: "
            f"{', '.join(below[:5])}{', ...' if len(below) > 5 else ''}."
        )
    raise AdapterFormatError(
        f"{folder} holds no {weights[0]}. It holds: {', '.join(names[:9]) or 'nothing'}"
        f"{', ...' if len(names) > 9 else ''}. Give the folder or the file of an adapter."
    )


def refuse_file_without_adapter(keys: List[str], path: str) -> NoReturn:
    """Raises AdapterFormatError for a file in an unknown form."""
    refuse_keys(keys, path)
    alike = sorted(key for key in keys if "lora" in key.lower())
    if alike:
        raise AdapterFormatError(
            f"{path} holds LoRA tensors under names that mindlora does not know: {listed_keys(alike)}. Save it in "
            "PEFT's form with the program that trained it."
        )
    raise AdapterFormatError(
        f"{path} holds no LoRA tensor. It holds: {listed_keys(sorted(keys)) or 'nothing'}. Give the file of an adapter."
    )


def _refuse(form: Foreign, path: str) -> NoReturn:
    raise AdapterFormatError(f"{path} is {form.name}, which mindlora cannot read. {form.advice}")


def _adapters_below(folder: str, weights: Tuple[str, ...]) -> Iterator[str]:
    """Yields the folders below ``folder`` that hold an adapter, down to a few levels."""
    for seen, (current, folders, files) in enumerate(os.walk(folder)):
        depth = os.path.relpath(current, folder).count(os.sep) + 1
        if current != folder and any(name in files for name in weights):
            yield current
        if depth >= _DEPTH:
            folders.clear()
        if seen >= _FOLDERS:
            return
