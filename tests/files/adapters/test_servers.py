"""inspect --for: would a server take an adapter as it is, and is what it advises then taken."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mindlora import cli
from mindlora.core.errors import ConfigError
from mindlora.core.numerics.dtypes import BFLOAT16, from_float32
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.servers import check_for_server
from mindlora.models import names

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
    assert check_for_server(written(adapter), "vllm").accepted
    report = check_for_server("adapter", "vllm==0.31.2")
    assert not report.accepted and "combine served --method cat --adapter ADAPTER 1" in report.problems[0]
    words = ["adapter", "combine", "served", "--method", "cat", "--adapter", "adapter", "1"]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert check_for_server("served", "vllm==0.31.2").accepted
    for path in (WQ, WV):
        np.testing.assert_allclose(adapter_files.read("served").delta(path), adapter.delta(path), rtol=1e-5, atol=1e-5)


def test_several_ranks_with_one_scale_are_served():
    assert check_for_server(written(make((4, 2), (8.0, 4.0))), "vllm==0.11").accepted


def test_a_rank_above_all_limits_is_resized():
    report = check_for_server(written(make((520, 520))), "vllm")
    assert report.problems == (
        "Its rank is 520, but at most 512 is served. Make it smaller: mindlora adapter resize ADAPTER served --rank "
        "512",
    )


def test_other_forms_are_converted_first():
    report = check_for_server(written(make(), "ckpt", "adapter.ckpt"), "vllm")
    assert "mindlora adapter convert adapter.ckpt served --to peft" in report.problems[0] and len(report.problems) == 1


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
    assert message in problem and "Merge it into the base (mindlora base merge)" in problem


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
        (without_head, {"alora_invocation_tokens": [1]}, "so the adapter acts from these tokens on only"),
    ],
    ids=["named", "required", "unnamed", "pissa", "aLoRA"],
)
def test_what_loads_in_peft_and_not_in_vllm(rename, fields, message):
    edited(rename, modules_to_save=None, **fields)
    problems = check_for_server("adapter", "vllm").problems
    assert any(message in problem for problem in problems), problems


@pytest.mark.parametrize(
    "name, version, accepted", [("score", "0.32", True), ("score", "0.31", False), ("norm", "0.33", False)]
)
def test_the_whole_head_of_a_classifier_is_served_since_vllm_0_32(name, version, accepted):
    written(make(saved_modules={f"{name}.weight": np.ones((3, 8), np.float32)}))
    report = check_for_server("adapter", f"vllm=={version}")
    assert report.accepted == accepted
    assert any("--runner pooling" in note for note in report.notes) == accepted
    assert accepted or f"It has modules_to_save ({name}.weight), which are refused" in report.problems[0]


def test_the_whole_head_of_a_classifier_of_tokens_is_not_served():
    for task, accepted in (("SEQ_CLS", True), ("TOKEN_CLS", False)):
        written(make(saved_modules={"score.weight": np.ones((3, 8), np.float32)}, peft_fields={"task_type": task}))
        report = check_for_server("adapter", "vllm==0.33")
        assert report.accepted == accepted
    assert "the whole head of a classifier of tokens, which is refused" in report.problems[0]


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
    assert cli.main(["adapter", "inspect", "adapter", "--for", "vllm"]) == 0
    assert "vllm     would serve it as it is" in capsys.readouterr().out
    written(dora())
    assert cli.main(["adapter", "inspect", "adapter", "--for", "vllm", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["accepted"] is False
    assert cli.main(["adapter", "inspect", "adapter", "--for", "vlm"]) == 1
    assert "Did you mean 'vllm'?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="No rules are known for a server 'tgi'"):
        check_for_server("adapter", "tgi")
    with pytest.raises(ConfigError, match="The version of 'vllm==new' is not a number. Write it as in vllm==0.33.0"):
        check_for_server("adapter", "vllm==new")


EXPERTS = "model.layers.0.mlp.experts"


def stacked(tmp_path, model_type, weights=("gate_up_proj", "down_proj")):
    """The folder of an adapter of stacked experts, whose base is a folder with a config.json."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": model_type}))
    adapter = Adapter({}, base_model=str(tmp_path / "base"))
    for name, rows in (("gate_up_proj", 8), ("down_proj", 6)):
        path = names.to_mindformers(f"{EXPERTS}.{name}")
        if name in weights:
            adapter.tensors[path, "A"] = np.ones((3, 2, 6 if rows == 8 else 4), np.float32)
            adapter.tensors[path, "B"] = np.ones((3, rows, 2), np.float32)
            adapter.alphas[path] = 4.0
    return written(adapter)


@pytest.mark.parametrize("server", ["vllm==0.11", "vllm-mindspore"])
def test_experts_are_refused_before_vllm_took_them(tmp_path, server):
    (problem,) = check_for_server(stacked(tmp_path, "qwen2"), server).problems
    assert "It adapts routed experts, which are refused" in problem


def test_stacked_experts_are_split_where_vllm_keeps_them_apart(tmp_path, capsys):
    adapter = stacked(tmp_path, "qwen3_moe")
    (problem,) = check_for_server(adapter, "vllm").problems
    assert problem.endswith("mindlora adapter convert adapter served --to peft --experts single")
    assert "unless it runs with --enable-mixed-moe-lora-format" in problem
    assert "--enable-mixed" not in check_for_server(adapter, "vllm==0.22").problems[0]
    assert cli.main(problem.rpartition("mindlora ")[2].split()) == 0, capsys.readouterr().err
    assert check_for_server("served", "vllm").accepted
    assert not check_for_server("served", "vllm==0.11").accepted


def test_stacked_experts_are_taken_in_pefts_layout_since_vllm_0_23(tmp_path):
    adapter = stacked(tmp_path, "qwen3_5_moe")
    assert not check_for_server(adapter, "vllm==0.22.1").accepted
    report = check_for_server(adapter, "vllm==0.23")
    assert report.accepted and any("is_3d_moe_weight" in note for note in report.notes)
    keys = load_file(Path(adapter) / "adapter_model.safetensors")
    start = "base_model.model.model.layers.0.mlp.experts"
    assert keys[f"{start}.base_layer.lora_A.weight"].shape == (3 * 2, 6)
    assert keys[f"{start}.lora_B.weight"].shape == (6, 2 * 3)


def test_one_of_the_two_weights_of_experts_is_not_served(tmp_path):
    (problem,) = check_for_server(stacked(tmp_path, "qwen3_5_moe", ["gate_up_proj"]), "vllm").problems
    assert "It adapts one of the two weights of a layer's experts" in problem


def test_vllm_ascend_fails_on_several_devices():
    report = check_for_server(written(make()), "vllm-ascend==0.23.0")
    assert report.accepted and any("#16586" in note and "--fully-sharded-loras" in note for note in report.notes)


def test_vllm_mindspore_takes_qwen2_and_no_bfloat16(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    adapter = make(base_model=str(tmp_path / "base"))
    adapter.tensors = {key: from_float32(array, BFLOAT16) for key, array in adapter.tensors.items()}
    base, dtype = check_for_server(written(adapter), "vllm-mindspore").problems
    assert "Its base is a llama" in base and "It holds bfloat16" in dtype
    assert check_for_server("adapter", "vllm").accepted


def test_mindie_takes_linear_cells_and_loads_them_while_it_serves_since_2_3():
    assert check_for_server(written(make((4, 2), (8.0, 16.0))), "mindie").accepted
    old, new = (check_for_server("adapter", f"mindie=={version}").notes for version in ("2.1", "2.3.0"))
    assert any("loads no adapter while it serves" in note for note in old)
    assert any("only where ATB Models" in note for note in new)
    assert all(any("At most ten" in note for note in notes) for notes in (old, new))
    (problem,) = check_for_server(written(dora()), "mindie").problems
    assert "MindIE has plain LoRA alone. Merge it" in problem
    (problem,) = check_for_server(written(make(), "ckpt", "adapter.ckpt"), "mindie").problems
    assert "mindlora adapter convert adapter.ckpt served --to peft" in problem


def test_llama_cpp_takes_what_is_converted_and_ollama_what_is_merged():
    written(make())
    (problem,) = check_for_server("adapter", "llama.cpp").problems
    assert problem.endswith("Write that: mindlora adapter convert adapter served.gguf")
    (problem,) = check_for_server("adapter", "ollama").problems
    assert "Since 0.34.1 Ollama refuses a Modelfile with ADAPTER. Merge it" in problem
    (problem,) = check_for_server("adapter", "ollama==0.33").problems
    assert "mindlora adapter convert adapter served.gguf" in problem
    (problem,) = check_for_server(written(dora()), "llama.cpp").problems
    assert "llama.cpp has plain LoRA alone" in problem
