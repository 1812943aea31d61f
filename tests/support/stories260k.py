"""stories260K: a small Llama that somebody else pretrained, from llama2.c's files to Hugging Face's folder."""

import json
import os
import pathlib
import struct
from typing import Dict, List, Tuple

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

DATA = pathlib.Path(os.environ.get("MINDLORA_TEST_DATA", "not given"))
# What its author publishes as the greedy continuation of "Once upon a time".
PUBLISHED = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
BOS, EOS = 1, 2


def data_file(name: str) -> pathlib.Path:
    """Returns a file of MINDLORA_TEST_DATA, or skips the test where it is not."""
    if not (DATA / name).is_file():
        pytest.skip(f"MINDLORA_TEST_DATA is not a folder with {name}")
    return DATA / name


def stories() -> List[str]:
    """Returns five stories of the kind that the model was trained on."""
    text = data_file("tinystories_sample.txt").read_text(encoding="utf-8")
    return [story.strip() for story in text.split("<|endoftext|>") if story.strip()]


def write_folder(folder: pathlib.Path, kept: int = 99) -> pathlib.Path:
    """Writes config.json, model.safetensors and the tokenizer, as Hugging Face's Llama has them; returns the folder.

    A model of which the first layers alone are ``kept`` tells words apart, and compiles faster.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, tensors = read_model(data_file("stories260K.bin"), kept)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(data_file("tok512.bin")).save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    names = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special})
    (folder / "tokenizer_config.json").write_text(names, encoding="utf-8")
    return folder


def read_model(path: pathlib.Path, kept: int) -> Tuple[Dict[str, object], Dict[str, np.ndarray]]:
    """Reads layers of llama2.c's file, version 0: seven numbers, and float32 tensors; the head is the embedding."""
    content = path.read_bytes()
    hidden, ffn, layers, heads, kv_heads, vocabulary, context = struct.unpack("<7i", content[:28])
    values = np.frombuffer(content, np.float32, offset=28)
    head = hidden // heads
    shapes = {
        "embed_tokens": (vocabulary, hidden),
        "input_layernorm": (layers, hidden),
        "self_attn.q_proj": (layers, hidden, hidden),
        "self_attn.k_proj": (layers, kv_heads * head, hidden),
        "self_attn.v_proj": (layers, kv_heads * head, hidden),
        "self_attn.o_proj": (layers, hidden, hidden),
        "post_attention_layernorm": (layers, hidden),
        "mlp.gate_proj": (layers, ffn, hidden),
        "mlp.down_proj": (layers, hidden, ffn),
        "mlp.up_proj": (layers, ffn, hidden),
        "norm": (hidden,),
    }
    tensors: Dict[str, np.ndarray] = {}
    start = 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensor = values[start : start + size].reshape(shape)
        start += size
        if name in ("embed_tokens", "norm"):
            tensors[f"model.{name}.weight"] = tensor.copy()
            continue
        for layer in range(min(layers, kept)):
            rows = tensor[layer]
            if name in ("self_attn.q_proj", "self_attn.k_proj"):
                rows = halves_from_pairs(rows, head)
            tensors[f"model.layers.{layer}.{name}.weight"] = rows.copy()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": min(layers, kept),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    return config, tensors


def halves_from_pairs(rows: np.ndarray, head: int) -> np.ndarray:
    """Orders the rows of each head for a rotation of its two halves; llama2.c rotates neighbors."""
    heads = rows.shape[0] // head
    return rows.reshape(heads, head // 2, 2, -1).transpose(0, 2, 1, 3).reshape(rows.shape)


def tokenizer(path: pathlib.Path) -> Tokenizer:
    """Reads llama2.c's tok.bin: a vocabulary with scores, by which sentencepiece merges."""
    pieces, scores = read_pieces(path)
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for piece, score in zip(pieces[259:], scores[259:]):
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-score, vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    model = BPE(vocabulary, [merge[3:] for merge in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = [("<s>", BOS)]
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=special)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def read_pieces(path: pathlib.Path) -> Tuple[List[str], List[float]]:
    """Returns the pieces of tok.bin as sentencepiece writes them, and their scores."""
    content = path.read_bytes()
    pieces: List[str] = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    scores: List[float] = []
    start = 4
    while start < len(content):
        score, length = struct.unpack("<fi", content[start : start + 8])
        piece = content[start + 8 : start + 8 + length]
        start += 8 + length
        scores.append(score)
        if len(scores) > len(pieces):
            pieces.append(piece.decode("utf-8").replace(" ", "▁"))
    return pieces, scores
