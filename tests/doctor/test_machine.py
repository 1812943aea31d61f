"""mindlora doctor: what it finds on a machine and in YAMLs, and that it is quiet about those of configs/."""

import ast
import glob
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import yaml

from mindlora import cli
from mindlora.common.tables import WIDTH
from mindlora.doctor import machine as doctor
from mindlora.doctor import yaml_checks
from mindlora.doctor.yaml_checks import PET, check_yaml
from mindlora.models import targets
from mindlora.models.llama import linear_sizes
from tests.conftest import ROOT

CONFIGS = sorted(glob.glob(os.path.join(ROOT, "configs", "*", "*.yaml")))
DATA = "train_dataset.data_loader.dataset_dir"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Returns a function that writes a YAML without faults, changed as its keys (dotted places) say."""
    # What mindlora-run says is tested apart: MindFormers takes seconds to import.
    monkeypatch.setattr(yaml_checks, "_check_as_mindlora_run", lambda path: [])
    (tmp_path / "base.ckpt").touch()
    (tmp_path / "rows.mindrecord").touch()

    def make(changes=None, name="run.yaml"):
        config = {
            "run_mode": "finetune",
            "load_checkpoint": str(tmp_path / "base.ckpt"),
            "context": {"device_target": "Ascend"},
            "lr_schedule": {"learning_rate": 1e-4},
            "runner_wrapper": {"type": "LoraTrainOneStepCell", "scale_sense": 1.0},
            "train_dataset": {"data_loader": {"type": "MindDataset", "dataset_dir": str(tmp_path / "rows.mindrecord")}},
            "model": {
                "arch": {"type": "LlamaForCausalLM"},
                "model_config": {
                    "type": "LlamaConfig",
                    "hidden_size": 64,
                    "num_layers": 2,
                    "num_heads": 4,
                    "n_kv_heads": 1,
                    "intermediate_size": 96,
                    "vocab_size": 100,
                    "compute_dtype": "bfloat16",
                    "param_init_type": "bfloat16",
                    "pet_config": {"pet_type": "lora", "lora_rank": 8, "lora_alpha": 16, "target_modules": ".*wq|.*wv"},
                },
            },
        }
        for place, value in (changes or {}).items():
            *nodes, key = place.split(".")
            node = config
            for part in nodes:
                node = node.setdefault(part, {})
            node[key] = value
        path = tmp_path / name
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return str(path)

    return make


def told(path, severity=None):
    """Returns (severity, key) of the findings, notes left out unless asked for."""
    return [
        (finding.severity, finding.key)
        for finding in check_yaml(path)
        if (finding.severity != "note" if severity is None else finding.severity == severity)
    ]


def the(path, key):
    (found,) = (finding for finding in check_yaml(path) if finding.key == key and finding.severity != "note")
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=[os.path.basename(path) for path in CONFIGS])
def test_the_configurations_of_the_project_have_no_faults(path, mindformers):
    findings = check_yaml(path)
    assert {finding.severity for finding in findings} == {"note"}
    assert DATA in [finding.key for finding in findings]


def test_a_yaml_without_faults(write):
    findings = check_yaml(write())
    assert [(finding.severity, finding.key, finding.found) for finding in findings] == [
        (
            "note",
            f"{PET}.target_modules",
            "LoRA on 4 cells, 3,328 parameters: model.layers.{0..1}.attention.wq, model.layers.{0..1}.attention.wv.",
        )
    ]


@pytest.mark.parametrize(
    "changes, severity, key, found",
    [
        ({"run_mode": "fintune"}, "error", "run_mode", "run_mode is 'fintune', which is not known. Did you mean 'fine"),
        (
            {f"{PET}.pet_type": "lroa"},
            "error",
            f"{PET}.pet_type",
            "pet_type is 'lroa', which is not known: MindFormers "
            "would train the whole network. Did you mean 'lora'? Known: lora, prefixtuning, ptuning2, qlora, slora.",
        ),
        ({f"{PET}.pet_type": None}, "error", f"{PET}.pet_type", "pet_type is None, which is not known"),
        ({PET: "lora"}, "error", PET, "It is 'lora'."),
        (
            {f"{PET}.lora_rnk": 8},
            "error",
            f"{PET}.lora_rnk",
            "pet_config has an unknown key 'lora_rnk'. Did you mean 'lora_rank'?",
        ),
        (
            {f"{PET}.adapter_pth": "x"},
            "error",
            f"{PET}.adapter_pth",
            "pet_config has an unknown key 'adapter_pth'. Did you mean 'adapter_path'?",
        ),
        ({f"{PET}.lora_rank": 0}, "error", f"{PET}.lora_rank", "lora_rank is 0: it must be a whole number"),
        ({f"{PET}.target_modules": None}, "error", PET, "pet_config has no target_modules"),
        (
            {f"{PET}.lora_alpha": 1e-4},
            "warning",
            f"{PET}.lora_alpha",
            "lora_alpha is 0.0001, which looks like a learning rate",
        ),
        (
            {f"{PET}.target_modules": ".*query"},
            "error",
            f"{PET}.target_modules",
            "target_modules '.*query' matches no "
            "linear cell. Linear cells of this network: model.layers.{0..1}.attention.wq, ",
        ),
        (
            {f"{PET}.target_modules": ["wq", "wz"]},
            "error",
            f"{PET}.target_modules",
            "target_modules ['wq', 'wz']: 'wz' matches no linear cell.",
        ),
        (
            {f"{PET}.target_modules": ".*wq|.*wz"},
            "warning",
            f"{PET}.target_modules",
            "target_modules '.*wq|.*wz': '.*wz' matches no linear cell.",
        ),
        (
            {f"{PET}.exclude_modules": "nothing"},
            "error",
            f"{PET}.exclude_modules",
            "exclude_modules 'nothing' matches no",
        ),
        ({f"{PET}.layers_to_transform": [1, 7]}, "error", f"{PET}.layers_to_transform", "layers_to_transform names 7,"),
        (
            {"model.model_config.qkv_concat": True, f"{PET}.target_modules": ".*wq"},
            "error",
            f"{PET}.target_modules",
            "target_modules names wq, but here model.layers.0.attention.w_qkv holds wq, wk, wv in one cell.",
        ),
        (
            {f"{PET}.lora_rank": 17},
            "warning",
            f"{PET}.lora_rank",
            "The rank is above the smaller side of 2 weights, 16 at the least: model.layers.{0..1}.attention.wv.",
        ),
        ({f"{PET}.rank_pattern": {"wk": 4}}, "warning", f"{PET}.rank_pattern", "'wk' matches none of the cells"),
        ({f"{PET}.alpha_pattern": {"wk": 4}}, "warning", f"{PET}.alpha_pattern", "'wk' matches none of the cells"),
        (
            {f"{PET}.param_init_type": "bfloat16"},
            "warning",
            f"{PET}.param_init_type",
            "A and B are kept in bfloat16, which "
            "has 8 bits: a step of the optimizer below 1/256 of a weight is rounded away.",
        ),
        (
            {f"{PET}.compute_dtype": "float16", "runner_wrapper.scale_sense": 1024},
            "warning",
            f"{PET}.compute_dtype",
            "LoRA computes in float16 on activations of bfloat16",
        ),
        (
            {"model.model_config.compute_dtype": "float16", "model.model_config.param_init_type": "float16"},
            "warning",
            "runner_wrapper.scale_sense",
            "Gradients are computed in float16 and the loss is not scaled",
        ),
        (
            {"model.model_config.compute_dtype": "float16", "runner_wrapper.scale_sense": {"type": "X"}},
            "warning",
            "model.model_config.compute_dtype",
            "The base is bfloat16 and is computed in float16",
        ),
        (
            {"model.model_config.compute_dtype": "float61"},
            "error",
            "model.model_config.compute_dtype",
            "compute_dtype is 'float61': it must be one of",
        ),
        (
            {"model.model_config.num_heads": "4"},
            "error",
            "model.model_config",
            "The sizes of the model cannot be worked",
        ),
        ({"lr_schedule.learning_rate": "1e-4"}, "error", "lr_schedule.learning_rate", "YAML reads 1e-4 as text"),
        (
            {"model.model_config.rms_norm_eps": "1.0e5"},
            "warning",
            "model.model_config.rms_norm_eps",
            "YAML reads 1.0e5 as",
        ),
        ({"load_checkpoint": "none.ckpt"}, "error", "load_checkpoint", "none.ckpt does not exist, seen from "),
        ({"load_checkpoint": 3}, "error", "load_checkpoint", "It is 3."),
        ({f"{PET}.loraplus_lr_ratio": 0.5}, "error", f"{PET}.loraplus_lr_ratio", "loraplus_lr_ratio is 0.5: it must"),
        ({f"{PET}.lora_init": "pisa"}, "error", f"{PET}.lora_init", "lora_init is 'pisa', which is not known."),
        ({f"{PET}.adapter_path": "none"}, "error", f"{PET}.adapter_path", "none does not exist"),
        ({DATA: "none.mindrecord"}, "error", DATA, "none.mindrecord does not exist"),
        ({"train_dataset": {}}, "error", "train_dataset.data_loader", "It is missing."),
        (
            {"processor.tokenizer.vocab_file": "none.model"},
            "error",
            "processor.tokenizer.vocab_file",
            "none.model does",
        ),
        (
            {"do_eval": True, "eval_dataset.data_loader": {"type": "MindDataset", "dataset_dir": "none"}},
            "error",
            "eval_dataset.data_loader.dataset_dir",
            "none does not exist",
        ),
    ],
)
def test_what_is_wrong_is_found_once_and_nothing_else(write, changes, severity, key, found):
    path = write(changes)
    assert told(path) == [(severity, key)]
    assert the(path, key).found.startswith(found)
    assert doctor.examine([path]).exit_code == (severity == "error")


@pytest.mark.parametrize(
    "changes, key, found",
    [
        ({"load_checkpoint": ""}, "load_checkpoint", "It is empty: the base under the adapter has random weights."),
        ({DATA: ""}, DATA, "It is empty: there is no data."),
        ({PET: None}, PET, "There is none: the whole network is trained, without LoRA."),
        ({f"{PET}.pet_type": "ptuning2"}, f"{PET}.pet_type", "ptuning2 is MindFormers' own; it was not checked."),
        ({"model.arch.type": "GLM"}, f"{PET}.target_modules", "The model is GLM: its cells are not known here"),
        ({"moe_config": {"expert_num": 8}}, f"{PET}.target_modules", "The model is LlamaForCausalLM with experts: its"),
        (
            {"model.model_config.param_init_type": "float16"},
            "model.model_config.param_init_type",
            "The base is kept in float16 and each product rounds it to bfloat16.",
        ),
    ],
)
def test_notes_are_no_faults(write, changes, key, found):
    path = write(changes)
    assert told(path) == [] and doctor.examine([path]).exit_code == 0
    assert any(finding.key == key and finding.found.startswith(found) for finding in check_yaml(path))


@pytest.mark.parametrize(
    "changes",
    [
        {f"{PET}.preset": "small_dataset"},
        {f"{PET}.target_modules": "all-linear", f"{PET}.rank_pattern": {"wk|wv": 4}},
        {f"{PET}.target_modules": ["q_proj", "model.layers.1.self_attn.v_proj"]},
        {f"{PET}.lora_rank": 16},
        {
            "model.model_config.compute_dtype": "float16",
            "model.model_config.param_init_type": "float16",
            "runner_wrapper.scale_sense": {"type": "DynamicLossScaleUpdateCell"},
        },
        {
            "run_mode": "predict",
            f"{PET}.param_init_type": "float16",
            "model.model_config.compute_dtype": "float16",
            "model.model_config.param_init_type": "float16",
            DATA: "none",
        },
        {"eval_dataset.data_loader": {"type": "MindDataset", "dataset_dir": "none"}},
        {"train_dataset.data_loader": {"type": "MindDataset", "dataset_files": ["x"], "dataset_dir": "none"}},
    ],
)
def test_what_is_right_is_not_found_fault_with(write, changes):
    assert told(write(changes)) == []


def test_the_core_speaks_again_after_a_check(write):
    before = targets.logger.handlers, targets.logger.propagate
    check_yaml(write({f"{PET}.target_modules": ".*wq|.*wz"}))
    assert (targets.logger.handlers, targets.logger.propagate) == before


def test_a_number_that_yaml_reads_as_text_is_written_right(write):
    for text, right in (("1e-4", "1.0e-4"), ("5e5", "5.0e+5"), ("2.5e3", "2.5e+3")):
        found = the(write({"lr_schedule.learning_rate": text}), "lr_schedule.learning_rate")
        assert found.advice == f"Write {right}."
        assert yaml.safe_load(right) == float(text)


@pytest.mark.parametrize(
    "content, found",
    [
        ("a: [", "is not YAML: while parsing"),
        ("- a\n- b", "holds no keys"),
        ("", "holds no keys"),
        ("run_mode: train", "has no model.model_config"),
        ("model: {model_config: 3}", "has no model.model_config"),
        ("model: 3", "has no model.model_config"),
        (None, "cannot be read: No such file or directory."),
        (b"\xff\xfe", "is not YAML"),
    ],
)
def test_a_file_that_is_no_yaml_of_mindformers(tmp_path, content, found):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    (finding,) = check_yaml(str(path))
    assert (finding.severity, finding.key) == ("error", "") and finding.found.startswith(f"{path} {found}")


def test_base_config_is_laid_under(write, tmp_path):
    write(name="base.yaml")
    path = tmp_path / "over.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "base_config": "base.yaml",
                "model": {"model_config": {"pet_config": {"lora_rank": 99, "target_modules": ".*wo"}}},
            }
        ),
        encoding="utf-8",
    )
    assert told(str(path)) == [("warning", f"{PET}.lora_rank")]
    path.write_text("base_config: [base.yaml, none.yaml]", encoding="utf-8")
    (finding,) = check_yaml(str(path))
    assert finding.found == f"{tmp_path / 'none.yaml'} cannot be read: No such file or directory."


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"n_kv_heads": None, "intermediate_size": None},
        {"intermediate_size": None, "multiple_of": 24},
        {"intermediate_size": None, "multiple_of": 1, "ffn_dim_multiplier": 1.3},
        {"qkv_concat": True},
        {"num_layers": 1, "num_heads": 8, "n_kv_heads": 2},
    ],
)
def test_cells_and_sizes_are_those_that_mindformers_builds(make_llama, keys):
    from mindlora.nn.dense import linear_types

    network = make_llama(**keys)
    built = {
        path: (cell.out_channels, cell.in_channels)
        for path, cell in network.cells_and_names()
        if isinstance(cell, linear_types())
    }
    config = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        **keys,
    }
    assert linear_sizes(config) == built


def test_sizes_of_mindformers_defaults():
    assert linear_sizes({})["model.layers.31.feed_forward.w2"] == (4096, 11008)
    assert len(linear_sizes({})) == 32 * 7 + 1


def test_what_mindlora_run_refuses_is_found(mindformers, tmp_path):
    with open(os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml"), encoding="utf-8") as file:
        text = file.read()
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("use_past: False", "use_past: True"), encoding="utf-8")
    (finding,) = (finding for finding in check_yaml(str(path)) if finding.severity == "error")
    assert finding.found.startswith(
        "context.device_target is CPU, where this YAML cannot run. Set: model.model_config.use_past: False"
    )
    path.write_text(text.replace("context:", "context: 3\nother:"), encoding="utf-8")
    (finding,) = (finding for finding in check_yaml(str(path)) if finding.severity == "error")
    assert finding.found.startswith("mindlora-run would stop at it: ")


def test_the_tested_pairs_are_those_of_setup():
    with open(os.path.join(ROOT, "setup.py"), encoding="utf-8") as file:
        tree = ast.parse(file.read())
    (pairs,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "MINDFORMERS_BY_MINDSPORE"
    )
    assert doctor.TESTED_PAIRS == pairs


def machine(monkeypatch, **versions):
    """Returns name -> Item, where only ``versions`` are installed."""

    def version(name):
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = doctor.examine()
    return {fact.name: fact for fact in report.machine}, report


def test_a_pair_that_was_tested(monkeypatch):
    facts, report = machine(monkeypatch, mindspore="2.7.2", mindformers="1.8.0", numpy="1.26.4")
    assert facts["MindFormers"] == doctor.Item("MindFormers", "1.8.0", "tested together with MindSpore 2.7.2")
    assert facts["safetensors"].value == "not installed" and report.findings == () and report.exit_code == 0


@pytest.mark.parametrize(
    "versions, found",
    [
        (
            {"mindspore": "2.9.0", "mindformers": "1.8.0"},
            "MindSpore 2.9.0 and MindFormers 1.8.0 were not tested together.",
        ),
        ({"mindspore": "2.9.0"}, "MindFormers: not installed. Nothing can be trained here."),
        ({}, "MindSpore and MindFormers: not installed. Nothing can be trained here."),
    ],
)
def test_a_pair_that_was_not(monkeypatch, versions, found):
    facts, report = machine(monkeypatch, **versions)
    (finding,) = report.findings
    assert (finding.severity, finding.found) == ("warning", found) and "2.9.0 with MindFormers 1.9.0" in finding.advice
    assert report.exit_code == 0 and facts["LoRADense"].value == "composed"
    assert found in str(report)


@pytest.mark.parametrize("forced, path", [("composed", "composed"), ("ascend", None), ("cuda", None)])
def test_the_path_of_each_operator(monkeypatch, forced, path):
    monkeypatch.setenv("MINDLORA_BACKEND", forced)
    report = doctor.examine()
    facts = {fact.name: fact.value for fact in report.machine}
    if path:
        assert report.exit_code == 0 and not report.findings
        ops = ("lora_delta", "lora_linear", "multi_lora_delta", "multi_lora_slot_write")
        assert [facts[op] for op in ops] == [path] * 4
    else:
        (finding,) = report.findings
        assert finding.key == "MINDLORA_BACKEND" and finding.found.startswith(
            f"MINDLORA_BACKEND is {forced}".replace("cuda", "'cuda'")
        )
        assert "lora_delta" not in facts and report.exit_code == 1


def test_a_package_without_metadata(monkeypatch, tmp_path):
    (tmp_path / "mindformers").mkdir()
    (tmp_path / "mindformers" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("mindformers", tmp_path / "mindformers" / "__init__.py")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: (_ for _ in ()).throw(importlib.metadata.PackageNotFoundError(name))
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "mindformers" else None)
    facts = {fact.name: fact for fact in doctor.examine().machine}
    assert facts["MindFormers"].value == "unknown" and facts["MindSpore"].value == "not installed"


@pytest.fixture
def ascend(tmp_path, monkeypatch):
    """An empty machine whose /usr/local/Ascend is a folder here."""
    monkeypatch.setattr(doctor, "_ASCEND", str(tmp_path / "Ascend"))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "Ascend"


def facts_now():
    return {fact.name: fact for fact in doctor.examine().machine}


def test_a_machine_without_npu(ascend):
    facts = facts_now()
    assert facts["CANN"] == doctor.Item(
        "CANN",
        "not found",
        f"ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME not set, no {ascend}/ascend-toolkit/latest, no {ascend}/latest",
    )
    assert facts["driver"].value == "not found" and "no npu-smi" in facts["driver"].detail
    assert facts["NPUs"].value == "not found"


@pytest.mark.parametrize(
    "file, content, version",
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.0.RC3\n", "8.0.RC3"),
        ("version.info", "Version=8.1.RC1\nversion_dir=8.1\n", "8.1.RC1"),
        ("compiler/version.info", "Version=7.6.0.1.220\n", "7.6.0.1.220"),
        ("version.cfg", "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.2.RC1]\n", "8.2.RC1"),
        ("readme", "version=1", "unknown"),
    ],
)
@pytest.mark.parametrize("place", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", None])
def test_cann_is_found(ascend, monkeypatch, file, content, version, place):
    home = ascend / "ascend-toolkit" / "latest"
    (home / file).parent.mkdir(parents=True)
    (home / file).write_text(content)
    if place:
        monkeypatch.setenv(place, str(home))
    fact = facts_now()["CANN"]
    assert fact.value == version and fact.detail == (f"at {place}={home}" if place else f"at {home}")


def test_a_variable_that_points_nowhere_is_said(ascend, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    assert facts_now()["CANN"].detail.startswith("ASCEND_TOOLKIT_HOME not set, no ASCEND_HOME_PATH=/nowhere, no ")


def test_the_driver_is_found(ascend, tmp_path):
    (ascend / "driver").mkdir(parents=True)
    (ascend / "driver" / "version.info").write_text("Version=24.1.0\nascendhal_version=7.35.23\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npu-smi").touch(mode=0o755)
    fact = facts_now()["driver"]
    assert fact.value == "24.1.0" and fact.detail.endswith(f"npu-smi at {tmp_path}/bin/npu-smi")


def test_the_command_line(write, capsys):
    good, bad = write(name="good.yaml"), write({f"{PET}.lora_rank": 0, DATA: ""}, name="bad.yaml")
    assert cli.main(["doctor"]) == 0
    assert "LoRADense" in capsys.readouterr().out
    assert cli.main(["doctor", good]) == 0
    assert f"{good}: 1 note" in capsys.readouterr().out
    assert cli.main(["doctor", good, bad]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: 1 error, 1 note" in out and max(map(len, out.splitlines())) <= max(WIDTH, len(bad) + 20)
    assert out.index("error    model.model_config.pet_config.lora_rank") < out.index("note     train_dataset")
    assert cli.main(["doctor", bad, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["yamls"][0]["findings"][0]["key"] == f"{PET}.lora_rank"
    assert [fact["name"] for fact in report["machine"]][:2] == ["Python", "mindlora"]


def test_it_works_where_nothing_is_installed(write):
    code = (
        "import importlib.metadata, sys\n"
        "def version(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = version\n"
        "sys.modules.update(mindspore=None, mindformers=None)\n"
        "from mindlora import cli\n"
        "sys.exit(cli.main(['doctor', sys.argv[1]]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, write({f"{PET}.target_modules": ".*query"})],
        check=False,
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr == ""
    assert "MindFormers  not installed" in done.stdout and "matches no linear cell" in done.stdout


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"target_modules": ["embed_tokens", "wq"]}])
def test_parameters_of_variants_are_those_that_are_trained(keys, make_llama, tmp_path):
    from mindlora import LoraConfig, apply_lora

    pet = {"pet_type": "lora", "lora_rank": 2, "target_modules": ["wq", "w2"], **keys}
    model = {
        "type": "LlamaConfig",
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "n_kv_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        "pet_config": pet,
    }
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps({"model": {"model_config": model, "arch": {"type": "LlamaForCausalLM"}}}))
    found = "".join(finding.found for finding in check_yaml(str(path)))
    report = apply_lora(make_llama(), LoraConfig.from_pet_config(pet))
    assert f"LoRA on {len(report.replaced)} cells, {report.trainable:,} parameters" in found
