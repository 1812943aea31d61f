"""`mindlora generate` and `mindlora serve` on MindSpore's Ascend backend, with values: greedy answers are a CPU's.

The project's kernels run in their simulator; the arithmetic of MindSpore's and CANN's operators is the device's of
tests/support/ascend_backend. It is float16's there and float32's on the CPU: log-probabilities of the answers in one
batch move by up to 0.01, and the likeliest token leads by as little as 0.011.
"""

import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from mindlora.files.base.quantize import quantize_checkpoint
from tests.conftest import ROOT
from tests.support import forked
from tests.support.ascend_backend import on_request, run_program
from tests.support.ascend_backend.printed import printed
from tests.support.served_llama import serving, write_llama

ANSWERS = pathlib.Path(ROOT) / "tests/support/ascend_backend/programs/answers.py"
MODEL = "--model.model_config."
# What a YAML for Ascend has where the tiny one has what a CPU needs.
ON_ASCEND = (
    *("--context.device_target", "Ascend", f"{MODEL}compute_dtype", "float16", f"{MODEL}param_init_type", "float16"),
    *(f"{MODEL}fused_rms_norm", "True", f"{MODEL}use_rope_slice", "False"),
)
ASKED = (
    *("generate", "--config", "run.yaml", "--json", "--temperature", "0", "--max-tokens", "12", "--base"),
    *("--adapter", "first=adapters/first", "--adapter", "second=adapters/second"),
    *("--template", "none", "--prompt", "the cat the cat the", "--prompt", "hello"),
)
NF4 = ("--load_checkpoint", "nf4.safetensors", "--tokenizer", "base", f"{MODEL}pet_config.pet_type", "qlora")
COMMANDS = {
    "in one batch": ASKED,
    "guesses, fixed batches": (*ASKED, "--prompt-lookup", "4", "--fixed-batches", "2,6"),
    "one slot for two adapters": (*ASKED, "--slots", "1"),
    "4 bits": (*ASKED, *NF4),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """run.yaml, base/, adapters/ and the base in 4 bits of a Llama whose heads are as large as Ascend needs them."""
    made = tmp_path_factory.mktemp("llama")
    write_llama(str(made), head_dim=16)
    quantize_checkpoint(str(made / "base"), str(made / "nf4.safetensors"))
    return made


def answers(output):
    """The texts in what answers.py printed: command -> (prompt, adapter) -> text."""
    reports = printed(output, "answered")
    texts = [{(one["prompt"], one["adapter"]): one["text"] for one in report["answers"]} for report in reports]
    return dict(zip(COMMANDS, texts))


@pytest.fixture(scope="module")
def wanted(folder):
    """The answers of a CPU: command -> (prompt, adapter) -> text."""
    words = [str(ANSWERS), json.dumps(list(COMMANDS.values()))]
    cpu = forked.run(words, folder, {**os.environ, "PYTHONPATH": ROOT})
    assert cpu.returncode == 0, cpu.stderr[-3000:]
    return answers(cpu.stdout)


@on_request
def test_every_answer_of_base_and_adapters_is_that_of_a_cpu(folder, wanted):
    commands = [(*words, *ON_ASCEND) for words in COMMANDS.values()]
    npu = run_program(str(ANSWERS), json.dumps(commands), folder=folder, launches=True)
    assert npu.returncode == 0, npu.output[-3000:]
    assert len(wanted) == len(COMMANDS) and len(set(wanted["in one batch"].values())) == 6
    assert answers(npu.output) == wanted


# Mistakes in mindlora/serving/network.py: what is replaced by what. MindSpore finds the lengths by their name.
ANOTHER_NAME = {
    "        batch_valid_length: Tensor,": "        lengths: Tensor,",
    "batch_valid_length=batch_valid_length": "batch_valid_length=lengths",
}
ANOTHER_SLOT = {"self.slots_of_tokens, slots)": "self.slots_of_tokens, slots - 1)"}
# Runs a program with network.py of the folder that is named before it.
MISTAKEN = f"""
import runpy, sys
import mindlora.serving
mindlora.serving.__path__.insert(0, sys.argv.pop(1))
runpy.run_path({str(ANSWERS)!r}, run_name="__main__")
"""


def answer_with(mistake, folder, mistaken):
    """Returns what came of the first command with a mistake in a step, whose source is written to ``mistaken``."""
    source = (pathlib.Path(ROOT) / "mindlora/serving/network.py").read_text(encoding="utf-8")
    for right, wrong in mistake.items():
        assert right in source
        source = source.replace(right, wrong)
    (mistaken / "network.py").write_text(source, encoding="utf-8")
    commands = [(*COMMANDS["in one batch"], *ON_ASCEND)]
    return run_program(MISTAKEN, str(mistaken), json.dumps(commands), folder=folder, launches=True)


@on_request
def test_lengths_under_another_name_end_the_first_step(folder, tmp_path):
    run = answer_with(ANOTHER_NAME, folder, tmp_path)
    assert run.returncode != 0 and "Invalid kvSeqLen" in run.output, run.output[-3000:]


@on_request
def test_tokens_with_the_slot_before_theirs_get_the_answers_of_its_adapter(folder, wanted, tmp_path):
    run = answer_with(ANOTHER_SLOT, folder, tmp_path)
    assert run.returncode == 0, run.output[-3000:]
    expected = wanted["in one batch"]
    before = {None: None, "first": None, "second": "first"}
    moved = {(prompt, adapter): expected[prompt, before[adapter]] for prompt, adapter in expected}
    assert answers(run.output)["in one batch"] == moved != expected


def ask(url):
    """Answers of base and adapters that were asked at once: model -> text."""

    def answer(model):
        body = {"model": model, "prompt": "the cat the cat the", "max_tokens": 12, "temperature": 0}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=300, verify=False)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    models = ("llama", "first", "second", "first")
    with ThreadPoolExecutor(len(models)) as pool:
        return dict(zip(models, pool.map(answer, models)))


def on_ascend(program, folder):
    """As run_here of served_llama, on the backend."""
    ended = run_program(program, folder=folder, launches=True)
    return ended.returncode, ended.output[-3000:]


@on_request
def test_a_server_answers_as_a_cpu_s(folder):
    options = ("--model-name", "llama", "--slots", "1", "--prompt-lookup", "4", "--fixed-batches", "1,2")
    with serving(str(folder), *options) as server:
        wanted = ask(server.url)
    assert len(set(wanted.values())) == 3
    with serving(str(folder), *options, *ON_ASCEND, run=on_ascend) as server:
        assert ask(server.url) == wanted
