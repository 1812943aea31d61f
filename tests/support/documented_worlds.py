"""Folders in which the commands of a page can be run: what the pages name, tiny.

``/path/to/X`` of a page is path/to/X in such a folder.
"""

import csv
import gzip
import json
import os
import re
import shutil

import numpy as np
import pyarrow
import yaml
from pyarrow import parquet
from safetensors.numpy import load_file

from mindlora import cli
from mindlora.core.formats import ckpt_file
from mindlora.core.formats.safetensors_file import write_arrays
from mindlora.data import tokenizers
from mindlora.files.adapters import files
from mindlora.files.adapters.adapter import Adapter
from mindlora.training.health.adapter_health import CellValues, change_factors, measure
from mindlora.training.report.history import HistoryWriter
from tests.conftest import ROOT
from tests.support import diffusion_adapters, histories, mcore_checkpoints, served_llama, sharded_runs
from tests.support.chat_templates import CHATML, SPECIAL
from tests.support.sharded_runs import Scheme
from tests.test_documents import text_of

# Of the Qwen3 whose heads the pages state.
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Tokens that the models take: as many as the longest rows of a page on which one trains.
LENGTH = 512
# What pages call the folder of a model, which is a Llama here, and a tokenizer.
LLAMAS = (
    *("Qwen3-0.6B", "Llama-3.2-1B", "Llama-2-7b-hf", "llama2-7b-hf", "Qwen2.5-0.5B", "model", "stories260K", "FOLDER"),
    "tokenizer",
)
# What pages call an adapter of it.
ADAPTERS = ("my_adapter", "my_peft_adapter", "first", "second", "runs/a", "runs/b", "runs/best", "adapters/support")
BEST = "output/lora_checkpoint/best"
WORDS = ["the", "old", "boat", "lay", "by", "the", "north", "pier", "when", "the", "sea", "came", "in"]


def sentences(count, seed=0):
    """Returns texts of a few words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(WORDS, 6)) for _ in range(count)]


def write_json_lines(path, rows):
    """Writes rows as JSON Lines."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_rows():
    """Writes the data that the pages name, into the working folder."""
    pairs = [{"instruction": one, "output": two} for one, two in zip(sentences(32), sentences(32, 1))]
    for name in ("train", "general"):
        write_json_lines(f"{name}.jsonl", pairs)
    roles = ("user", "assistant")
    write_json_lines(
        "dialogues.jsonl",
        [{"messages": [{"role": role, "content": text} for role, text in zip(roles, row.values())]} for row in pairs],
    )
    with open("questions.csv", "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer"])
        rows.writerows(row.values() for row in pairs)
    parquet.write_table(pyarrow.Table.from_pylist(pairs), "medical.parquet")
    texts = "\n".join(sentences(400))
    for name in ("books.txt", "plays.txt", "other_plays.txt", "letter.txt", "prompts.txt"):
        with open(name, "w", encoding="utf-8") as file:
            file.write("\n".join(sentences(4)) if name in ("letter.txt", "prompts.txt") else texts[:2000])
    with gzip.open("articles.txt.gz", "wt", encoding="utf-8") as file:
        file.write(texts)
    with open("stories.txt", "w", encoding="utf-8") as file:
        file.write("***".join(sentences(8)))
    with open("template.jinja", "w", encoding="utf-8") as file:
        file.write(CHATML)
    write_json_lines(
        "questions.jsonl", [{"question": one, "choices": ["boat", "pier"], "answer": 0} for one in sentences(8)]
    )


def write_llama():
    """Writes run.yaml, a Llama under all its names, its base.ckpt, and adapters of it, into the working folder."""
    served_llama.write_llama(os.getcwd(), length=LENGTH)
    with open("run.yaml", encoding="utf-8") as file:
        config = yaml.safe_load(file)
    save_tokenizer("base")
    os.rename("base", "llama")
    config["load_checkpoint"] = "llama"
    # Those of the sharded run's slices.
    config["model"]["model_config"]["pet_config"].update(lora_rank=sharded_runs.RANK, lora_alpha=sharded_runs.ALPHA)
    with open("run.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    for name in LLAMAS:
        os.symlink("llama", name)
    done("base", "convert", "llama", "base.ckpt", "--to", "mindformers")
    for folder in ("tiny", "path/to"):
        os.makedirs(folder)
    os.symlink(os.path.abspath("llama"), "path/to/tokenizer")
    shutil.copy("base.ckpt", "tiny/base.ckpt")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if os.path.exists(f"llama/{name}"):
            shutil.copy(f"llama/{name}", name)
    rows = ("--input", "train.jsonl", "--output", "heldout.mindrecord", "--tokenizer", "llama", "--seq-length", "512")
    done("data", "alpaca", *rows)
    os.rename("adapters", "made")
    with open("made/first/adapter_config.json", encoding="utf-8") as file:
        config = json.load(file)
    with open("made/first/adapter_config.json", "w", encoding="utf-8") as file:
        json.dump({**config, "base_model_name_or_path": "llama2-7b-hf"}, file)
    for name in (*ADAPTERS, BEST, "pirate/lora_checkpoint/best"):
        shutil.copytree("made/first", name)
    served_llama.write_adapter(os.getcwd(), "judge", 3, kind="first", labels=2)
    shutil.move("adapters/judge", "judge")
    done("adapter", "convert", "my_adapter", "made.ckpt", "--to", "ckpt")
    # As MindFormers saves it: without lora_alpha.
    ckpt_file.write_arrays("llama_rank_0-100_2.ckpt", ckpt_file.read("made.ckpt", lambda _: True)[0].items())
    os.symlink(os.path.join(ROOT, "configs"), "configs")


def save_tokenizer(folder):
    """Saves a tokenizer that knows the words of the pages' data, whose rows are to be as short as with a real one."""
    pages = ("classifiers", "preferences", "sweep")
    texts = [text for page in pages for text in re.findall(r'"([^"\n]+)"', text_of(os.path.join("docs", f"{page}.md")))]
    tokenizer = tokenizers.fit_tokenizer([*texts, *WORDS] * 2, served_llama.VOCABULARY - len(SPECIAL))
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)


def write_qwen3():
    """Writes a Qwen3 of the heads that the pages state, and its adapter in the forms from which they convert."""
    sizes = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM}
    before = {name: getattr(mcore_checkpoints, name) for name in sizes}
    vars(mcore_checkpoints).update(sizes)
    try:
        tensors = mcore_checkpoints.qwen3()
    finally:
        vars(mcore_checkpoints).update(before)
    os.makedirs("Qwen3-8B")
    save_tokenizer("Qwen3-8B")
    write_arrays("Qwen3-8B/model.safetensors", tensors, {"format": "pt"})
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2}
    config.update(hidden_size=mcore_checkpoints.HIDDEN, intermediate_size=mcore_checkpoints.INNER)
    config.update(vocab_size=mcore_checkpoints.VOCAB, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    config.update(head_dim=HEAD_DIM, rms_norm_eps=1e-6, max_position_embeddings=LENGTH)
    with open("Qwen3-8B/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    rng, pairs, rank, wide = np.random.default_rng(0), {}, 2, mcore_checkpoints.HIDDEN
    for cell, rows in (("wq", HEADS), ("wk", KV_HEADS), ("wv", KV_HEADS)):
        path = f"model.layers.0.attention.{cell}"
        pairs[path, "A"] = rng.normal(size=(rank, wide)).astype(np.float32)
        pairs[path, "B"] = rng.normal(size=(rows * HEAD_DIM, rank)).astype(np.float32)
    adapter = Adapter(pairs, {path: 16.0 for path, _ in pairs})
    files.write(adapter, "my_qwen3_adapter")
    done("adapter", "convert", "my_qwen3_adapter", "made.safetensors", "--to", "mcore", "--base", "Qwen3-8B")
    write_arrays("mcore.safetensors", load_file("made.safetensors"))
    done("adapter", "convert", "my_qwen3_adapter", "output/checkpoint", "--to", "pynative", "--base", "Qwen3-8B")
    served_llama.write_qwen3_moe("moe")
    os.rename("moe/base", "Qwen3-30B-A3B")


def write_runs():
    """Writes what finished runs have left: histories, and the slices of a sharded run."""
    for name in ("runs/first", "runs/second"):
        histories.write_history(name, steps=40)
    rng = np.random.default_rng(0)
    history = HistoryWriter("output", 0)
    for step in (20, 40):
        parts = {"A": rng.normal(size=(4, 16)).astype(np.float32), "B": rng.normal(size=(16, 4)).astype(np.float32)}
        values = CellValues(4, parts, "B", change_factors(parts["A"], parts["B"]), gradient_norms={"A": 1.0, "B": 1.0})
        history.append(step, health=measure(step, {"model.layers.0.attention.wq": values}).to_json())
    history.close()
    sharded_runs.write_run("output", Scheme(dp=2, mp=2, opt=2))


def write_style():
    """Writes an adapter of Stable Diffusion, as diffusers has it."""
    adapter = diffusion_adapters.make()
    files.write(adapter, "style_of_diffusers", "diffusers")
    shutil.move("style_of_diffusers/pytorch_lora_weights.safetensors", "pytorch_lora_weights.safetensors")


def done(*words):
    """Runs a command of mindlora; returns nothing, and fails unless it is done."""
    assert cli.main(list(words)) == 0, words


def write_world(folder):
    """Writes all of it into an empty folder, in which the caller then works."""
    os.chdir(folder)
    write_rows()
    write_llama()
    write_qwen3()
    write_runs()
    write_style()
