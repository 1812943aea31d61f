"""GGUF files in llama.cpp: its log-probabilities are those of transformers with PEFT, its tokens the tokenizer's."""

import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from mindlora.core.errors import AdapterError
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.convert import Heads, convert_adapter
from mindlora.files.adapters.dialects.peft import WEIGHTS_FILE
from mindlora.files.base.llama_cpp import SPLITS
from mindlora.files.base.merge import merge_checkpoint
from mindlora.models import names
from tests.peers.conftest import TOKENS
from tests.peers.test_folders_against_transformers import LEGACY, MCORE, SIZES
from tests.support import stories260k
from tests.support.peers import cases

SIDE = pathlib.Path(__file__).parents[1] / "support" / "peers" / "llama_cpp_side.py"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# For logits; log-probabilities differ from them by one number a row.
TOLERANCE = 1e-3
TEXTS = ["How many cats are there, 12345?", "  温太医 isn't here\n\n\tI'LL WAIT", "a  b   c\r\n 7"]
IDS = np.random.default_rng(0).integers(4, 300, 64).tolist()
# How much of IDS is a prompt.
LENGTHS = (1, 2, 31, 64)
MODELS = {
    **{name: LEGACY[name] for name in ("llama-3", "llama-3.2", "biased", "linear", "qwen2.5")},
    "qwen3": MCORE["qwen3"],
}


def llama_cpp(peer, model, adapter=None, texts=(), prompts=(), vocabulary=SIZES["vocab_size"], letter=1):
    """Returns what llama_cpp_side.py answers; ``peer`` makes sure that there is its Python."""
    request = {
        "model": str(model),
        "adapter": adapter and str(adapter),
        "texts": list(texts),
        "prompts": list(prompts),
        "count": 56,
        "vocabulary": vocabulary,
        "letter": letter,
    }
    asked = subprocess.run(
        [os.environ["MINDLORA_PEERS_PYTHON"], str(SIDE)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert asked.returncode == 0, asked.stderr[-3000:]
    return json.loads(asked.stdout)


def made_up_adapter(folder, path, scale=1.0):
    """Saves a random adapter of all linear cells but the head in PEFT's folder, with several ranks and alphas."""
    rng = np.random.default_rng(1)
    adapter = Adapter({}, base_model=str(folder))
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights.update(load_file(file))
    for number, (name, weight) in enumerate(sorted(weights.items())):
        cell = name.removesuffix(".weight")
        if cell.rpartition(".")[2] not in LINEAR or name == cell:
            continue
        rank = 2 + number % 3
        cell = names.to_mindformers(cell)
        adapter.tensors[cell, "A"] = rng.standard_normal((rank, weight.shape[1])).astype(np.float32) / 8
        adapter.tensors[cell, "B"] = rng.standard_normal((weight.shape[0], rank)).astype(np.float32) / 4 * scale
        adapter.alphas[cell] = 4.0 if number % 2 else 6.0
    files.write(adapter, str(path))
    return path


def log_softmax(logits):
    logits = logits.astype(np.float64)
    highest = logits.max(-1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(-1, keepdims=True))


def byte_tokenizer(folder, pattern, bos):
    """Saves a tokenizer of bytes that cuts texts by a pattern, or by ByteLevel's own; ``bos`` begins every text."""
    cut = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps = [*cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(steps) if pattern else steps[0]
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=310,
        special_tokens=["<|bos|>", "<|eos|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    if bos:
        made.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<|bos|>", "eos_token": {"__type": "AddedToken", "content": "<|eos|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    return stories260k.write_folder(tmp_path_factory.mktemp("hub") / "stories260K")


@pytest.mark.parametrize("outtype", ["f32", "f16", "q8_0"])
def test_the_published_text_of_stories260k(peer, stories, outtype, tmp_path):
    zero = made_up_adapter(stories, tmp_path / "zero", scale=0)
    merge_checkpoint(str(stories), str(zero), str(tmp_path / "x.gguf"), outtype=outtype)
    start = "Once upon a time"
    answer = llama_cpp(peer, tmp_path / "x.gguf", texts=[start, *TEXTS], vocabulary=512)
    assert stories260k.PUBLISHED.startswith(start + answer["texts"][0])
    assert len(answer["texts"][0]) > 150
    tokenizer = Tokenizer.from_file(str(stories / "tokenizer.json"))
    assert answer["tokens"] == [tokenizer.encode(text).ids for text in (start, *TEXTS)]


@pytest.mark.parametrize("name", MODELS)
def test_adapter_and_merged_model_compute_as_peft(peer, name, tmp_path):
    kind, config = MODELS[name]
    folder = tmp_path / "base"
    peer.make_folder(folder=folder, kind=kind, config={**SIZES, **config}, seed=0)
    letter = byte_tokenizer(folder, None, bos=True).token_to_id("a")
    adapter = made_up_adapter(folder, tmp_path / "adapter")
    zero = made_up_adapter(folder, tmp_path / "zero", scale=0)
    merge_checkpoint(str(folder), str(zero), str(tmp_path / "base.gguf"), outtype="f32")
    merge_checkpoint(str(folder), str(adapter), str(tmp_path / "merged.gguf"), outtype="f32")
    convert_adapter(str(adapter), str(tmp_path / "adapter.gguf"), "gguf")

    ends = [length - 1 for length in LENGTHS]
    prompts = [IDS[:length] for length in LENGTHS]
    peer.logits(model=folder, ids=[IDS], path=tmp_path / "base.npy")
    peer.logits(model=folder, ids=[IDS], path=tmp_path / "adapted.npy", adapter=adapter)
    base, adapted = (log_softmax(np.load(tmp_path / f"{each}.npy")[0, ends]) for each in ("base", "adapted"))
    assert np.abs(base - adapted).max() > 100 * TOLERANCE
    for expected, files_of in (
        (base, ("base.gguf", None)),
        (adapted, ("merged.gguf", None)),
        (adapted, ("base.gguf", tmp_path / "adapter.gguf")),
    ):
        answer = llama_cpp(peer, tmp_path / files_of[0], files_of[1], prompts=prompts, letter=letter)
        np.testing.assert_allclose(answer["log_probabilities"], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pattern", [*SPLITS, None])
@pytest.mark.parametrize("bos", [True, False])
def test_tokens_of_bytes_are_the_tokenizers(peer, pattern, bos, tmp_path):
    folder = tmp_path / "base"
    peer.make_folder(folder=folder, kind="llama", config={**SIZES, "num_hidden_layers": 1}, seed=0)
    tokenizer = byte_tokenizer(folder, pattern, bos)
    made_up_adapter(folder, tmp_path / "adapter")
    merge_checkpoint(str(folder), str(tmp_path / "adapter"), str(tmp_path / "x.gguf"))
    answer = llama_cpp(peer, tmp_path / "x.gguf", texts=TEXTS)
    assert answer["tokens"] == [tokenizer.encode(text).ids for text in TEXTS]


# The beginnings of the names of PEFT's cases that llama.cpp does not take, and what the refusal says.
REFUSED = {
    "dora": "It is a DoRA adapter",
    "vera": "It is a VeRA adapter",
    "miss": "It is a MiSS adapter",
    "whole": "It replaces weights of the base",
    "bfloat16-whole": "It replaces weights of the base",
    "embeddings": "It replaces weights of the base",
}
LOADED = ("embedding-alone",)
# PEFT also saves the tables under these pairs, and the cases' are not their models'.
WITH_TABLES = ("lm_head", "embedding")


@pytest.fixture(scope="module")
def bases(made, tmp_path_factory):
    """Returns a function that returns the GGUF file of a case's model, in float32, with a tokenizer of letters.

    Where the case's adapter holds tables of the base, they are in the file.
    """
    folder = tmp_path_factory.mktemp("bases")

    def make(name):
        model = cases.ADAPTERS[name]["model"]
        base = folder / model
        if not base.exists():
            shutil.copytree(made.models[model], base)
            letters = {chr(ord("0") + number): number for number in range(cases.VOCABULARY - 1)}
            tokenizer = Tokenizer(models.BPE({**letters, "01": len(letters)}, [("0", "1")]))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.save(str(base / "tokenizer.json"))
            made_up_adapter(base, folder / f"{model}-zero", scale=0)
        file = folder / f"{name if name in WITH_TABLES else model}.gguf"
        if not file.exists():
            zero = zero_pairs(made.adapters[name], folder) if name in WITH_TABLES else folder / f"{model}-zero"
            merge_checkpoint(str(base), str(zero), str(file), outtype="f32")
        return file

    return make


def zero_pairs(adapter, folder):
    """Returns a copy of an adapter whose B are zero, so that merging it changes the tables alone."""
    zero = folder / f"{adapter.name}-zero"
    shutil.copytree(adapter, zero)
    tensors = load_file(zero / WEIGHTS_FILE)
    save_file(
        {key: np.zeros_like(value) if "_B" in key else value for key, value in tensors.items()}, zero / WEIGHTS_FILE
    )
    return zero


def refusal(name):
    """Returns what the refusal of a case says, or None."""
    return None if name in LOADED else next((text for start, text in REFUSED.items() if name.startswith(start)), None)


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_adapters_of_peft_are_loaded_or_refused(peer, made, peft_logits, bases, name, tmp_path):
    model = cases.ADAPTERS[name]["model"]
    base_file = bases(name)
    output = tmp_path / "a.gguf"
    sizes = cases.MODELS[model][1]
    heads = Heads(sizes["num_attention_heads"], sizes["num_key_value_heads"])

    def convert():
        return convert_adapter(
            str(made.adapters[name]), str(output), "gguf", heads=heads, allow_pickle=True, architecture="llama"
        )

    if refusal(name):
        with pytest.raises(AdapterError, match=refusal(name)):
            convert()
        assert not output.exists()
        return
    report = convert()
    assert bool(report.left_out) == (name in WITH_TABLES) == ("leaves out the table" in str(report))
    prompts = [made.ids[0, :length].tolist() for length in (1, TOKENS)]
    expected = log_softmax(peft_logits(model, made.adapters[name])[0, [0, TOKENS - 1]])
    answer = llama_cpp(peer, base_file, output, prompts=prompts, vocabulary=cases.VOCABULARY)
    np.testing.assert_allclose(answer["log_probabilities"], expected, rtol=0, atol=TOLERANCE)
