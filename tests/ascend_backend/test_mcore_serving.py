"""Qwen3, Qwen3-MoE and GLM4 served on MindSpore's Ascend backend, with values: greedy tokens are those of a CPU.

On Ascend the network computes in float16 here, whose rounding leaves the order of the likeliest tokens as it is.
"""

import json
import os
import pathlib

import numpy as np
import pytest

from mindlora.files.base.convert import convert_base
from tests.conftest import ROOT
from tests.support import forked
from tests.support.ascend_backend import EVERYTHING, on_request, run_program
from tests.support.ascend_backend.printed import printed
from tests.support.mcore_serving import write_folder
from tests.support.what_runs import shows

TRAINED = pathlib.Path(ROOT) / "tests/support/ascend_backend/programs/trained_tokens.py"
PROGRAM = pathlib.Path(ROOT) / "tests/support/ascend_backend/programs/served_tokens.py"
ON_ASCEND = ["--context.device_target", "Ascend", "--model.model_config.compute_dtype", "float16"]
# What write_folder takes, and sizes of the engine. The first one runs always, the others with MINDLORA_ASCEND_RUNS=all.
MODELS = {
    "qwen3-moe, guesses": ({"kind": "qwen3-moe"}, {"prompt_lookup": 3}),
    "glm4, chunks of prompts": ({"kind": "glm4"}, {"max_tokens_per_step": 32}),
    "qwen3, one slot for two adapters": ({"kind": "qwen3"}, {"slots": 1}),
}
ALWAYS = 1
ASKED = list(MODELS)[: None if EVERYTHING else ALWAYS]


def answers(output):
    """What the program printed: model -> what was asked -> (tokens, log-probabilities)."""
    return dict(zip(ASKED, printed(output, "answered")))


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The answers on Ascend, on a CPU, and the operators that were launched."""
    jobs = []
    for model in ASKED:
        made, sizes = MODELS[model]
        folder = tmp_path_factory.mktemp("model")
        jobs.append({"folder": str(write_folder(str(folder), **made, layers=1)), "seq_length": 96, **sizes})
    folder = tmp_path_factory.mktemp("runs")
    cpu = forked.run([str(PROGRAM), json.dumps(jobs)], folder, {**os.environ, "PYTHONPATH": ROOT})
    assert cpu.returncode == 0, cpu.stderr[-3000:]
    jobs = [{**job, "overrides": ON_ASCEND} for job in jobs]
    npu = run_program(str(PROGRAM), json.dumps(jobs), folder=folder, launches=True)
    assert npu.returncode == 0, npu.output[-3000:]
    return answers(npu.output), answers(cpu.stdout), npu.launches


@shows("served", "qwen3_moe", place="ascend")
@pytest.mark.parametrize("model", ASKED)
def test_tokens_of_base_and_adapters_are_those_of_a_cpu(answered, model):
    found, expected = answered[0][model], answered[1][model]
    assert {asked: tokens for asked, (tokens, _) in found.items()} == {
        asked: tokens for asked, (tokens, _) in expected.items()
    }
    for asked, (_, logprobs) in expected.items():
        np.testing.assert_allclose(found[asked][1], logprobs, atol=0.05, err_msg=asked)
    assert len({tuple(tokens) for tokens, _ in found.values()}) > 6, "adapters do not change answers"


def test_every_operator_of_a_step_was_computed(answered):
    left_out = {launch.name for launch in answered[2] if not launch.computed}
    assert not left_out
    names = {launch.name for launch in answered[2]}
    assert names >= {"PagedAttention", "ReshapeAndCache", "ApplyRotaryPosEmb", "aclnnGroupedMatmulV4"}


@on_request
def test_the_weights_of_a_network_in_training_are_sampled_from_as_they_are(tmp_path):
    folder = write_folder(str(tmp_path / "qwen3"), "qwen3")
    convert_base(f"{folder}/base", f"{folder}/mcore.safetensors", None, "mcore")
    words = [str(TRAINED), folder]
    cpu = forked.run([*words, "[]"], tmp_path, {**os.environ, "PYTHONPATH": ROOT})
    assert cpu.returncode == 0, cpu.stderr[-3000:]
    npu = run_program(*words, json.dumps(ON_ASCEND), folder=tmp_path, launches=True)
    assert npu.returncode == 0, npu.output[-3000:]
    ((expected,), (found,)) = (printed(output, "answered") for output in (cpu.stdout, npu.output))
    for number, (tokens, logprobs) in expected.items():
        assert found[number][0] == tokens
        np.testing.assert_allclose(found[number][1], logprobs, atol=0.05)
