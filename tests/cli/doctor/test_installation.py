"""mindlora doctor on a machine: packages, operators, CANN, driver and NPUs."""

import ast
import importlib.metadata
import importlib.util
import os
import re

import pytest

from mindlora.cli import doctor
from mindlora.cli.doctor import installation
from tests.conftest import ROOT


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def test_the_tested_pairs_are_those_that_can_be_installed():
    """setup.py has those that pip resolves, scripts/environment.sh and its files of requirements the others."""
    (by_pip,) = (
        ast.literal_eval(node.value)
        for node in ast.parse(read("setup.py")).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "MINDFORMERS_BY_MINDSPORE"
    )
    others = re.findall(r"(\S+)\) echo mindformers==(\S+) ;;", read("scripts", "environment.sh"))
    mindspore = [
        re.search(r"^mindspore==(\S+)$", read("scripts", f"{stack}-requirements.txt"), re.MULTILINE)[1]
        for stack, _ in others
    ]
    without_dependencies = zip(mindspore, (mindformers for _, mindformers in others))
    assert (*by_pip.items(), *without_dependencies) == installation.TESTED_PAIRS


def test_the_requirements_name_the_mindformers_that_comes_after_them():
    for stack, mindformers in re.findall(r"(\S+)\) echo (mindformers==\S+) ;;", read("scripts", "environment.sh")):
        line = f"pip install --no-deps {mindformers} ."
        assert line in read("scripts", f"{stack}-requirements.txt") and line in read("docs", "installation.md")


def examine_with(monkeypatch, **versions):
    """Returns {name: Item} and the report, as if only ``versions`` were installed."""

    def version(name):
        if name in versions:
            return versions[name]
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = doctor.examine()
    return {item.name: item for item in report.machine}, report


def test_a_tested_pair(monkeypatch):
    items, report = examine_with(monkeypatch, mindspore="2.7.2", mindformers="1.8.0", numpy="1.26.4")
    assert items["MindFormers"] == doctor.Item("MindFormers", "1.8.0", "tested together with MindSpore 2.7.2")
    assert items["safetensors"].value == "not installed" and report.findings == () and report.exit_code == 0


@pytest.mark.parametrize(
    "versions, value, detail, wrong",
    [
        ({"mindformers": "2.1.0"}, "not installed", "training in graph mode does not need it", False),
        ({"mindformers": "2.0.0"}, "not installed", "MindFormers 2.0.0 cannot be imported without it", True),
        ({"mindformers": "2.1.0", "hyper_parallel": "1.0.0"}, "1.0.0", "PyNative Trainer shards with it", False),
        ({"mindformers": "1.9.0"}, None, None, False),
    ],
)
def test_hyper_parallel(monkeypatch, versions, value, detail, wrong):
    items, report = examine_with(monkeypatch, **versions)
    item = items.get("hyper_parallel")
    assert (item and item.value) == value and (item is None or detail in item.detail)
    errors = [finding.found for finding in report.findings if finding.severity == "error"]
    assert bool(errors) == wrong == report.exit_code and all("it needs hyper_parallel" in text for text in errors)


@pytest.mark.parametrize(
    "versions, found",
    [
        (
            {"mindspore": "2.9.0", "mindformers": "1.8.0"},
            "MindSpore 2.9.0 and MindFormers 1.8.0 were not tested together.",
        ),
        ({"mindspore": "2.9.0"}, "MindFormers is not installed, so nothing can be trained here."),
        ({}, "MindSpore and MindFormers are not installed, so nothing can be trained here."),
    ],
)
def test_a_pair_that_was_not_tested(monkeypatch, versions, found):
    items, report = examine_with(monkeypatch, **versions)
    (finding,) = report.findings
    assert (finding.severity, finding.found) == ("warning", found) and "2.9.0 with MindFormers 1.9.0" in finding.advice
    assert report.exit_code == 0 and ("LoRADense" in items) == ("mindspore" in versions)
    assert found in str(report)


@pytest.mark.parametrize("forced, path", [("composed", "composed"), ("ascend", None), ("cuda", None)])
def test_the_path_of_each_operator(monkeypatch, forced, path):
    monkeypatch.setenv("MINDLORA_BACKEND", forced)
    report = doctor.examine()
    items = {item.name: item.value for item in report.machine}
    if path:
        assert report.exit_code == 0 and not report.findings
        ops = ("lora_delta", "lora_linear", "multi_lora_delta", "multi_lora_slot_write")
        assert [items[op] for op in ops] == [path] * 4
        assert items["LoRADense"] == path
    else:
        (finding,) = report.findings
        assert finding.key == "MINDLORA_BACKEND" and finding.found.startswith(
            f"MINDLORA_BACKEND is {forced}".replace("cuda", "'cuda'")
        )
        assert "lora_delta" not in items and "LoRADense" not in items and report.exit_code == 1


def test_the_operators_are_those_of_graph_mode(library, pynative_mode):
    import mindspore as ms

    items = items_now()
    assert items["LoRADense"] == doctor.Item(
        "LoRADense",
        "cpu",
        "fused operators of mindlora.ops in evaluation; in training plain MindSpore operators, which measured faster",
    )
    assert items["lora_delta"].value == "cpu" and items["lora_delta"].detail.startswith("graph mode on a CPU, ")
    assert ms.get_context("mode") == ms.PYNATIVE_MODE


def test_a_package_without_metadata(monkeypatch, tmp_path):
    (tmp_path / "mindformers").mkdir()
    (tmp_path / "mindformers" / "__init__.py").touch()
    spec = importlib.util.spec_from_file_location("mindformers", tmp_path / "mindformers" / "__init__.py")
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: (_ for _ in ()).throw(importlib.metadata.PackageNotFoundError(name))
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "mindformers" else None)
    items = {item.name: item for item in doctor.examine().machine}
    assert items["MindFormers"].value == "unknown" and items["MindSpore"].value == "not installed"


@pytest.fixture
def ascend(tmp_path, monkeypatch):
    """An empty machine whose /usr/local/Ascend is a folder here."""
    monkeypatch.setattr(installation, "_ASCEND", str(tmp_path / "Ascend"))
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "Ascend"


def items_now():
    return {item.name: item for item in doctor.examine().machine}


def test_a_machine_without_npu(ascend):
    items = items_now()
    assert items["CANN"] == doctor.Item(
        "CANN",
        "not found",
        f"ASCEND_HOME_PATH and ASCEND_TOOLKIT_HOME not set, no {ascend}/ascend-toolkit/latest, no {ascend}/latest",
    )
    assert items["driver"].value == "not found" and "no npu-smi" in items["driver"].detail
    assert items["NPUs"].value == "not found"


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
@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", None])
def test_cann_is_found(ascend, monkeypatch, file, content, version, variable):
    home = ascend / "ascend-toolkit" / "latest"
    (home / file).parent.mkdir(parents=True)
    (home / file).write_text(content)
    if variable:
        monkeypatch.setenv(variable, str(home))
    item = items_now()["CANN"]
    assert item.value == version and item.detail == (f"at {variable}={home}" if variable else f"at {home}")


def test_a_variable_that_points_nowhere_is_reported(ascend, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/nowhere")
    assert items_now()["CANN"].detail.startswith("ASCEND_TOOLKIT_HOME not set, no ASCEND_HOME_PATH=/nowhere, no ")


def test_the_driver_is_found(ascend, tmp_path):
    (ascend / "driver").mkdir(parents=True)
    (ascend / "driver" / "version.info").write_text("Version=24.1.0\nascendhal_version=7.35.23\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "npu-smi").touch(mode=0o755)
    item = items_now()["driver"]
    assert item.value == "24.1.0" and item.detail.endswith(f"npu-smi at {tmp_path}/bin/npu-smi")
