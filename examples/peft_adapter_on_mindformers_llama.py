"""An adapter in PEFT's format, loaded onto a Llama of MindFormers.

Run it with ``python examples/peft_adapter_on_mindformers_llama.py``. It needs MindFormers and no NPU. To have no
download, it writes a small adapter folder of random values itself; a folder that PEFT saved loads in the same way.
"""

import json
import os
import tempfile

# MindFormers writes its log into output/ under the working folder unless this says where else.
os.environ.setdefault("LOG_MF_PATH", os.path.join(tempfile.gettempdir(), "mindformers-log"))

import mindspore as ms
import numpy as np
from safetensors.numpy import save_file

import mindlora

HIDDEN, LAYERS, HEADS, VOCABULARY, LENGTH = 32, 2, 4, 64, 16
RANK = 4


def small_llama() -> ms.nn.Cell:
    """Returns a Llama of MindFormers that a CPU can run, with random weights."""
    from mindformers import LlamaConfig, LlamaForCausalLM

    float32 = ("compute_dtype", "param_init_type", "layernorm_compute_type", "softmax_compute_type", "rotary_dtype")
    config = LlamaConfig(
        batch_size=1,
        seq_length=LENGTH,
        hidden_size=HIDDEN,
        num_layers=LAYERS,
        num_heads=HEADS,
        vocab_size=VOCABULARY,
        intermediate_size=48,
        pad_token_id=0,
        use_flash_attention=False,
        fused_rms_norm=False,
        use_rope_slice=True,
        **dict.fromkeys(float32, "float32"),
    )
    return LlamaForCausalLM(config).set_train(False)


def write_peft_adapter(folder: str) -> None:
    """Writes what PEFT's save_pretrained writes: a JSON file with the configuration, and A and B for each module."""
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(LAYERS):
        for module in ("q_proj", "v_proj"):
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{key}.lora_A.weight"] = rng.standard_normal((RANK, HIDDEN), np.float32)
            tensors[f"{key}.lora_B.weight"] = rng.standard_normal((HIDDEN, RANK), np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    os.makedirs(folder)
    save_file(tensors, os.path.join(folder, "adapter_model.safetensors"))
    with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def main() -> None:
    """Writes an adapter folder, looks into it, loads it, and shows which cells it changed and what that does."""
    ms.set_context(device_target="CPU", mode=ms.GRAPH_MODE)
    tokens = ms.Tensor(np.random.default_rng(1).integers(1, VOCABULARY, (1, LENGTH)), ms.int32)
    with tempfile.TemporaryDirectory() as folder:
        adapter = os.path.join(folder, "adapter")
        write_peft_adapter(adapter)
        print(mindlora.inspect_adapter(adapter))
        network = small_llama()
        before = network(tokens)[0].asnumpy()
        mindlora.load_lora(network, adapter)
        after = network(tokens)[0].asnumpy()
    adapted = [path for path, cell in network.cells_and_names() if isinstance(cell, mindlora.LoRADense)]
    print(f"cells with an adapter: {', '.join(adapted)}")
    print(f"largest change of the logits: {np.abs(after - before).max():.3f}")


if __name__ == "__main__":
    main()
