"""inspect --for: would vLLM serve an adapter as it is, and is what it advises then served."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import cli
from mindlora.adapters import files as adapter_files
from mindlora.adapters.adapter import Adapter
from mindlora.adapters.servers import check_for_server
from mindlora.errors import ConfigError

WQ, WV = "model.layers.0.attention.wq", "model.layers.1.attention.wv"


def make(ranks=(4, 4), alphas=(8.0, 8.0), **changes):
    random = np.random.default_rng(0)
    tensors = {}
    for path, rank in zip((WQ, WV), ranks):
        tensors[path, "A"] = random.normal(size=(rank, 8)).astype(np.float32)
        tensors[path, "B"] = random.normal(size=(6, rank)).astype(np.float32)
    return Adapter(tensors, dict(zip((WQ, WV), alphas)), **changes)


def written(adapter, to="peft", path="adapter"):
    adapter_files.write(adapter, path, to)
    return path


@pytest.mark.parametrize("server", ["vllm", "vllm-ascend", "vllm-mindspore"])
def test_a_plain_adapter_is_served(server):
    report = check_for_server(written(make()), server)
    assert report.accepted and report.exit_code == 0 and not report.problems
    assert "q_proj, v_proj" in str(report) and "the server was not run" in str(report)
    assert ("Qwen2 alone" in str(report)) is (server == "vllm-mindspore")


@pytest.mark.parametrize("rank, option", [(16, None), (17, 32), (64, 64), (400, 512)])
def test_a_rank_above_the_default_needs_the_servers_option(rank, option):
    report = check_for_server(written(make((rank, rank))), "vllm")
    assert report.accepted
    assert any(note.endswith(f"start the server with --max-lora-rank {option}.") for note in report.notes) is bool(
        option
    )


@pytest.mark.parametrize("ranks, alphas", [((4, 4), (8.0, 16.0)), ((4, 2), (8.0, 8.0))])
def test_several_scales_would_be_computed_wrongly_and_combine_mends_them(ranks, alphas, capsys):
    adapter = make(ranks, alphas)
    report = check_for_server(written(adapter), "vllm")
    assert not report.accepted and "combine served --method cat --adapter ADAPTER 1" in report.problems[0]
    words = ["combine", "served", "--method", "cat", "--adapter", "adapter", "1"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert check_for_server("served", "vllm").accepted
    for path in (WQ, WV):
        np.testing.assert_allclose(adapter_files.read("served").delta(path), adapter.delta(path), rtol=1e-5, atol=1e-5)


def test_several_ranks_with_one_scale_are_served():
    assert check_for_server(written(make((4, 2), (8.0, 4.0))), "vllm").accepted


def test_a_rank_above_all_limits_is_resized():
    report = check_for_server(written(make((520, 520))), "vllm")
    assert report.problems == (
        "Its rank is 520, and at most 512 is served. Make it smaller: mindlora resize ADAPTER served --rank 512",
    )


def test_other_forms_are_converted_first():
    report = check_for_server(written(make(), "ckpt", "adapter.ckpt"), "vllm")
    assert "mindlora convert adapter.ckpt served --to peft" in report.problems[0] and len(report.problems) == 1


@pytest.mark.parametrize(
    "prepare, message",
    [
        (lambda: written(make(saved_modules={"lm_head.weight": np.ones((9, 8), np.float32)})), "modules_to_save (lm_"),
        (lambda: written(dora()), "It is a DoRA adapter (use_dora), which is refused"),
        (lambda: written(convolution()), "It adapts cells that are neither linear nor an embedding: conv"),
    ],
)
def test_what_is_refused_is_merged_instead(prepare, message):
    prepare()
    (problem,) = check_for_server("adapter", "vllm").problems
    assert message in problem and "Merge it into the base (mindlora merge)" in problem


def edited(rename=str, **fields):
    """The folder of a plain adapter with other keys and other fields; a field that is ... is taken out."""
    folder = Path(written(make(saved_modules={"lm_head.weight": np.ones((9, 8), np.float32)})))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {new: array for key, array in tensors.items() if (new := rename(key))}, folder / "adapter_model.safetensors"
    )
    config = {**json.loads((folder / "adapter_config.json").read_text()), **fields}
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def without_head(key):
    return None if "lm_head" in key else key


@pytest.mark.parametrize(
    "rename, fields, message",
    [
        (
            lambda key: without_head(key.replace(".weight", ".default.weight")),
            {},
            "Its keys have the adapter's name in",
        ),
        (without_head, {"r": ..., "lora_alpha": 8, "rank_pattern": {".*": 4}}, "Its configuration lacks r, without"),
        (str, {}, "It holds weights besides A and B (lm_head.weight), which are refused."),
        (without_head, {"init_lora_weights": "pissa"}, "the adapter belongs to a base that this initializer changed"),
        (without_head, {"alora_invocation_tokens": [1]}, "the adapter then acts on some tokens only"),
    ],
    ids=["named", "required", "unnamed", "pissa", "aLoRA"],
)
def test_what_loads_in_peft_and_not_in_vllm(rename, fields, message):
    edited(rename, modules_to_save=None, **fields)
    problems = check_for_server("adapter", "vllm").problems
    assert any(message in problem for problem in problems), problems


def dora():
    adapter = make()
    for path in (WQ, WV):
        adapter.tensors[path, "magnitude"] = np.ones(6, np.float32)
    return adapter


def convolution():
    pair = {("conv", "A"): np.ones((4, 3, 3, 3), np.float32), ("conv", "B"): np.ones((5, 4, 1, 1), np.float32)}
    return Adapter(pair, {"conv": 8.0})


def test_the_command_ends_with_1_where_it_would_not_be_served(capsys):
    written(make())
    assert cli.main(["inspect", "adapter", "--for", "vllm"]) == 0
    assert "vllm     would serve it as it is" in capsys.readouterr().out
    written(dora())
    assert cli.main(["inspect", "adapter", "--for", "vllm", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["accepted"] is False
    assert cli.main(["inspect", "adapter", "--for", "vlm"]) == 1
    assert "Did you mean 'vllm'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="No rules are known of a server 'tgi'"):
        check_for_server("adapter", "tgi")
