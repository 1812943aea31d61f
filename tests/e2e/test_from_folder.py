"""The way of the README from a model's folder and rows to an adapter and its answers, on a tiny Llama in bfloat16."""

import json
import re
import shlex

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.llama_checkpoints import HIDDEN, HUGGING_FACE, llama, save_base
from tests.support.runs import ROOT, python, succeeded

VOCABULARY = 384
PROGRAMS = {"mindlora": "mindlora.cli", "mindlora-run": "mindlora.training.launch.launcher"}


def commands(first, last):
    """Returns the commands of the README's block that begins and ends with these words."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = [block.strip().splitlines() for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S)]
    return next(block for block in blocks if block[0].startswith(first) and block[-1].startswith(last))


def run(command, folder):
    """Runs a command of mindlora, and returns what it printed."""
    program, *words = shlex.split(command, comments=True)
    return succeeded(python(["-m", PROGRAMS[program], *words], folder))


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    """The folder in which the README's three commands ran."""
    folder = tmp_path_factory.mktemp("readme")
    tensors = llama(BFLOAT16)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        values = np.random.default_rng(0).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
        tensors[name] = from_float32(values, BFLOAT16)
    config = {**HUGGING_FACE, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}
    save_base(folder / "Llama-3.2-1B", tensors, **config)
    chat_tokenizer(CHATML).save_pretrained(folder / "Llama-3.2-1B")
    rows = [{"instruction": f"How many cats, {number}?", "output": "There are 2 cats."} for number in range(8)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    way = commands("mindlora data", "mindlora-run")
    assert len(way) == 3
    for command in way:
        run(command, folder)
    return folder


def test_three_commands_make_an_adapter(trained):
    history = (trained / "output" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [step["loss"] for step in map(json.loads, history) if "loss" in step]
    assert len(losses) == 3 and all(map(np.isfinite, losses))
    adapter = load_file(trained / "output" / "lora_checkpoint" / "best" / "adapter_model.safetensors")
    assert len(adapter) == 2 * 7 * 2 and all(array.any() for array in adapter.values())


def test_the_folder_answers_with_the_adapter(trained):
    """Serving compares the adapter's fingerprint of the base with the folder's: it was trained on these weights."""
    asked = commands("mindlora generate", "mindlora serve")[0]
    report = json.loads(run(f"{asked} --max-tokens 4 --json", trained).splitlines()[-1])
    assert [answer["adapter"] for answer in report["answers"]] == [None, "best"]
    assert not any(answer["error"] for answer in report["answers"])
