"""Common parts of the benchmark serving: a random Llama with adapters in files, engines on it, and prompts."""

import dataclasses
import itertools
import json
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
from safetensors.numpy import save_file

from mindlora.core.numerics.dtypes import from_float32, named_dtype
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.base.quantize import quantize_checkpoint
from mindlora.serving.adapter_registry import AdapterRegistry
from mindlora.serving.build import make_engine
from mindlora.serving.engine import Engine
from mindlora.serving.settings import EngineSettings


@dataclasses.dataclass(frozen=True)
class Size:
    """The size of a Llama, and the extent of the measurements on it."""

    width: int = 1024
    intermediate: int = 2752
    heads: int = 16
    layers: int = 4
    vocabulary: int = 32000
    contexts: Tuple[int, ...] = (128, 512)
    rounds: int = 30

    def wider(self) -> "Size":
        """Returns this size with twice the width and heads of the same size."""
        return dataclasses.replace(self, width=2 * self.width, intermediate=2 * self.intermediate, heads=2 * self.heads)

    @property
    def key(self) -> str:
        """A key that distinguishes the files of different sizes."""
        return f"{self.width}-{self.layers}-{self.vocabulary}"

    def cells(self) -> Dict[str, Tuple[int, int]]:
        """Returns name -> [out, in] of a layer's linear cells."""
        square = (self.width, self.width)
        up = (self.intermediate, self.width)
        down = (self.width, self.intermediate)
        attention = {f"attention.{name}": square for name in ("wq", "wk", "wv", "wo")}
        return {**attention, "feed_forward.w1": up, "feed_forward.w2": down, "feed_forward.w3": up}

    def __str__(self):
        return (
            f"Llama {self.width} wide (intermediate {self.intermediate}, {self.heads} heads, vocabulary "
            f"{self.vocabulary}), {self.layers} layers"
        )


FULL = Size()
QUICK = Size(256, 688, 4, 2, 2048, (32,), 5)
# Names of the linear cells in a Hugging Face checkpoint.
_HUGGING_FACE = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


class Files:
    """Checkpoints and adapters in a folder, each created on first use.

    Args:
        folder (str): The existing folder.
    """

    def __init__(self, folder: str):
        self.folder = folder

    def base(self, size: Size) -> str:
        """Returns a folder with a random model in Hugging Face's format, in float32."""
        path = os.path.join(self.folder, f"base-{size.key}")
        if os.path.exists(path):
            return path
        os.makedirs(path)
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            values = rng.standard_normal(shape, np.float32)
            values *= 0.02
            return values

        tensors = {"model.embed_tokens.weight": normal(size.vocabulary, size.width)}
        for layer in range(size.layers):
            prefix = f"model.layers.{layer}."
            for name, shape in size.cells().items():
                tensors[f"{prefix}{_HUGGING_FACE[name]}.weight"] = normal(*shape)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}{norm}.weight"] = np.ones(size.width, np.float32)
        tensors["model.norm.weight"] = np.ones(size.width, np.float32)
        tensors["lm_head.weight"] = normal(size.vocabulary, size.width)
        save_file(tensors, os.path.join(path, "model.safetensors"), {"format": "pt"})
        with open(os.path.join(path, "config.json"), "w", encoding="utf-8") as file:
            json.dump(_hugging_face_config(size), file)
        return path

    def nf4(self, size: Size) -> str:
        """Returns the same model with its linear cells in NF4."""
        path = os.path.join(self.folder, f"nf4-{size.key}.safetensors")
        if not os.path.exists(path):
            quantize_checkpoint(self.base(size), path)
        return path

    def adapters(self, size: Size, ranks: Dict[str, int], dtype: str = "float32") -> Dict[str, str]:
        """Returns name -> PEFT folder of a random adapter of the given rank and dtype on all linear cells."""
        paths = {name: os.path.join(self.folder, f"adapters-{size.key}-{dtype}", name) for name in ranks}
        for name, path in paths.items():
            if not os.path.exists(path):
                made = random_adapter(size, ranks[name], name)
                made.tensors = {key: from_float32(array, named_dtype(dtype)) for key, array in made.tensors.items()}
                files.write(made, path)
        return paths

    def engine(
        self,
        size: Size,
        registry: Optional[AdapterRegistry] = None,
        nf4: bool = False,
        checkpoint: Optional[str] = None,
        dtype: str = "float32",
        **sizes: Any,
    ) -> Engine:
        """Returns an engine, not started, on the model in float32 or NF4; ``sizes`` as in EngineSettings.

        ``checkpoint`` is another checkpoint of the same sizes; ``dtype`` is the dtype of linear cells that are not in
        NF4.
        """
        checkpoint = checkpoint or (self.nf4(size) if nf4 else self.base(size))
        settings = EngineSettings(**{"seq_length": max(size.contexts) + 128, "max_running": 8, "slots": 1, **sizes})
        words, node = tokenizer(size.vocabulary), mindformers_node(size)
        node["model_config"].update(param_init_type=dtype, embedding_init_type="float32")
        return make_engine(
            node, checkpoint, words, registry or AdapterRegistry(), settings, quantize_base="nf4" if nf4 else None
        )


def random_adapter(size: Size, rank: int, name: str) -> Adapter:
    """Returns an adapter that changes a cell's output by about a tenth to a third."""
    rng = np.random.default_rng(list(name.encode()))
    tensors = {}
    alphas = {}
    for layer, (cell, (rows, columns)) in itertools.product(range(size.layers), size.cells().items()):
        path = f"model.layers.{layer}.{cell}"
        tensors[path, "A"] = rng.standard_normal((rank, columns), np.float32) / np.float32(columns**0.5)
        tensors[path, "B"] = rng.standard_normal((rows, rank), np.float32) * np.float32(0.1 / rank**0.5)
        alphas[path] = float(rank)
    return Adapter(tensors, alphas)


def tokenizer(vocabulary: int) -> Any:
    """Returns a tokenizer with a word for each token of a model, so that answers are decoded to text."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {f"w{place}": place for place in range(3, vocabulary)}
    words.update({"<unk>": 0, "<s>": 1, "</s>": 2})
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def prompts(size: Size, count: int, length: int, seed: int = 0) -> List[List[int]]:
    """Returns random prompts."""
    return np.random.default_rng([seed, length]).integers(3, size.vocabulary, (count, length)).tolist()


def popularity(shape: str, count: int, adapters: Sequence[str], seed: int = 0) -> List[str]:
    """Returns the adapters of ``count`` requests: identical, distinct, uniform or zipf (the n-th with weight 1 / n)."""
    rng = np.random.default_rng(seed)
    if shape == "identical":
        return [adapters[0]] * count
    if shape == "distinct":
        return [adapters[place % len(adapters)] for place in range(count)]
    weights = 1.0 / np.arange(1, len(adapters) + 1) if shape == "zipf" else np.ones(len(adapters))
    return [adapters[place] for place in rng.choice(len(adapters), count, p=weights / weights.sum())]


SHAPES = ("identical", "distinct", "uniform", "zipf")


def _hugging_face_config(size):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.width,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "vocab_size": size.vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def mindformers_node(size: Size) -> Dict[str, Any]:
    """Returns the node ``model`` of a YAML."""
    config = {
        "type": "LlamaConfig",
        "seq_length": 4096,
        "hidden_size": size.width,
        "intermediate_size": size.intermediate,
        "num_layers": size.layers,
        "num_heads": size.heads,
        "vocab_size": size.vocabulary,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "compute_dtype": "float32",
        "layernorm_compute_type": "float32",
        "softmax_compute_type": "float32",
        "rotary_dtype": "float32",
        "param_init_type": "float32",
        "fused_rms_norm": False,
        "use_rope_slice": True,
    }
    return {"model_config": config, "arch": {"type": "LlamaForCausalLM"}}
