"""A folder in GPTQ, held in its own bits: the run on it is that on the decoded one, and it answers with the adapter."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file

from mindlora.training.report.history import read_history
from tests.support import mcore_pynative_run
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.held_bases import save_bases
from tests.support.runs import LAUNCHER, python, succeeded
from tests.support.what_runs import shows

HOLDS = ("--model.model_config.pet_config.quantize_base", "as_stored")
COMMANDS = ("-m", "mindlora.cli")
# On one of the models the adapter is a DoRA, whose norms are those of the rows that the integers stand for.
ADAPTERS = {"llama": (), "qwen3": ("--model.model_config.pet_config.use_dora", "True")}


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A tokenizer, and the rows that are made with it."""
    folder = tmp_path_factory.mktemp("tokenized")
    chat_tokenizer(CHATML).save_pretrained(folder / "tokenizer")
    rows = [{"instruction": f"How many cats, {number}?", "output": "There are 2 cats."} for number in range(3)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    made = ("--input", "rows.jsonl", "--output", "rows.mindrecord", "--tokenizer", "tokenizer", "--seq-length", "400")
    succeeded(python([*COMMANDS, "data", "alpaca", *made], folder))
    return folder / "tokenizer", folder / "rows.mindrecord"


@pytest.fixture(scope="module", params=ADAPTERS)
def runs(request, library, tokenized, tmp_path_factory):
    """The folder with the YAML of a run, and what the run printed, by how it holds the base; and the base."""
    folder, (tokenizer, rows) = tmp_path_factory.mktemp(request.param), tokenized
    held, _, _ = save_bases(folder, request.param, "gptq", layers=1)
    shutil.copytree(tokenizer, held, dirs_exist_ok=True)
    drafted = ("--from", held, "--device", "cpu", "--data", rows, "--output", "run.yaml")
    succeeded(python([*COMMANDS, "configs", *drafted], folder))
    printed = {}
    for name, options in (("held", HOLDS), ("decoded", ())):
        words = ("--config", "run.yaml", "--epochs", "2", "--output_dir", name, *ADAPTERS[request.param], *options)
        # A graph of the decoded base would say nothing more.
        program = LAUNCHER if name == "held" else ["-c", mcore_pynative_run.SCRIPT]
        printed[name] = succeeded(python([*program, *words], folder))
    return folder, printed, held


@shows("as_stored", "llama", "qwen3")
def test_the_adapter_is_the_one_of_the_decoded_base(runs):
    folder, printed, _ = runs
    paths = {name: folder / name / "lora_checkpoint" / "best" / "adapter_model.safetensors" for name in printed}
    held, decoded = (load_file(paths[name]) for name in ("held", "decoded"))
    assert held.keys() == decoded.keys() and any(array.any() for array in held.values())
    is_dora = json.loads((paths["held"].parent / "adapter_config.json").read_text(encoding="utf-8"))["use_dora"]
    assert is_dora == any("magnitude" in name for name in held)
    # Adam makes whole steps of gradients that are almost zero, in which the last bits of DoRA's norms count.
    for name, array in decoded.items() if not is_dora else ():
        np.testing.assert_allclose(held[name], array, rtol=0, atol=1e-5 * np.abs(array).max(), err_msg=name)
    losses = {name: read_history(str(folder / name)).series("loss")[1] for name in printed}
    assert len(losses["held"]) > 1
    assert losses["held"][0] == pytest.approx(losses["decoded"][0], rel=1e-6)
    np.testing.assert_allclose(losses["held"], losses["decoded"], rtol=1e-4 if is_dora else 1e-5)
    assert "7 weights are held in their own bits: GPTQ in 4 bits." in printed["held"]
    assert "7 weights are decoded from GPTQ in 4 bits to float32." in printed["decoded"]


def test_the_held_base_answers_with_it_as_the_decoded_one(runs):
    folder, _, held = runs
    asked = ("--model", held, "--adapter", "held/lora_checkpoint/best", "--prompt", "Cats?", "--max-tokens", "8")
    texts = {}
    for options in ((), ("--quantize-base", "as_stored")):
        answered = python([*COMMANDS, "generate", *asked, "--template", "none", "--json", *options], folder)
        texts[options] = [answer["text"] for answer in json.loads(succeeded(answered))["answers"]]
        assert ("held in their own bits" in answered.stderr) == bool(options)
    assert len({tuple(text) for text in texts.values()}) == 1
