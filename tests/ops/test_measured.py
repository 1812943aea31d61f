"""Choices that were measured on an NPU, adopted from a report of scripts/verify_npu.sh."""

import json
import os

import pytest

from mindlora import __version__
from mindlora.core.errors import ConfigError
from mindlora.ops import backend, measured

COMPOSED = {"nf4_linear": "the kernel does not hold in float16"}


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    path = tmp_path / "lib/ascend/measured.json"
    monkeypatch.setattr(measured, "FILE", str(path))
    return path


def report(folder, **changes):
    content = {
        "machine": {"name": "910B3", "mindlora": __version__},
        "choices": {"composed": COMPOSED, "one_pass_tokens": 16, "draw_tenths": 15, "mix_launch": 2100},
        "steps": [],
        **changes,
    }
    (folder / "report.json").write_text(json.dumps(content))
    return str(folder / "report.json")


def test_without_a_report_nothing_is_measured():
    assert measured.measured() is None and measured.read_adopted() is None


@pytest.mark.parametrize("name", ["report.json", ""])
def test_what_a_report_measured_is_kept(tmp_path, name):
    report(tmp_path)
    adopted = measured.adopt(os.path.join(tmp_path, name))
    assert adopted == measured.Measured("910B3", __version__, COMPOSED, 16, 15, 2100) == measured.measured()
    assert str(adopted) == (
        "nf4_linear composed, because the kernel does not hold in float16; lora_linear up to 16 tokens; a core draws "
        "1.5 shares of the bandwidth; a launch of cube cores costs 2100 ns more"
    )


def test_a_later_report_replaces_an_earlier_one(tmp_path):
    measured.adopt(report(tmp_path))
    measured.adopt(report(tmp_path, choices={"composed": {}, "one_pass_tokens": None}))
    assert str(measured.measured()) == "all kernels hold"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"machine": None}, "is not a report of scripts/verify_npu.sh: name the report.json that it wrote."),
        ({"choices": None}, "compared no operator on an NPU, so it has no choices"),
        ({"machine": {"name": "910B3", "mindlora": "0.0.1"}}, f"measured mindlora 0.0.1, but this is {__version__}"),
        ({"choices": {"composed": [], "one_pass_tokens": 1}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {"x": 1}}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {}, "one_pass_tokens": -1}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {}, "one_pass_tokens": True}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {}, "draw_tenths": 9}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {}, "mix_launch": 0.5}}, "has measured choices that cannot be read"),
        ({"choices": {"composed": {"lora_dleta": "why"}}}, "has measured choices that cannot be read"),
        ({"machine": {"mindlora": __version__}}, "has measured choices that cannot be read"),
    ],
)
def test_what_is_no_report_of_an_npu_is_refused(tmp_path, file, changes, message):
    with pytest.raises(ConfigError) as error:
        measured.adopt(report(tmp_path, **changes))
    assert message in str(error.value) and not file.exists()


def test_a_report_that_is_not_there_or_not_json_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read .No such file or directory.: name the report.json"):
        measured.adopt(str(tmp_path / "nothing.json"))
    (tmp_path / "report.json").write_text("# mindlora on this machine")
    with pytest.raises(ConfigError, match="is not JSON"):
        measured.adopt(str(tmp_path))


def test_choices_of_another_version_are_not_used(tmp_path, monkeypatch):
    measured.adopt(report(tmp_path))
    monkeypatch.setattr(measured, "__version__", "99.0")
    assert measured.measured() is None and measured.read_adopted().mindlora == __version__


def test_the_operators_are_those_with_a_kernel():
    assert set(measured.OPERATORS) == {op for op, kernel in backend.ASCEND_OP_TYPES.items() if kernel}


@pytest.fixture
def on_npu(monkeypatch):
    """An NPU in name, whose kernels are all there."""
    monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
    monkeypatch.setattr(backend.ms, "get_context", lambda name: {"device_target": "Ascend", "mode": 0}[name])
    monkeypatch.setattr(backend, "_ascend_problem", lambda op, device: None)


def test_a_kernel_that_does_not_hold_is_not_taken_unless_it_is_asked_for(tmp_path, on_npu, monkeypatch):
    assert backend.choose("nf4_linear").path == "ascend"
    measured.adopt(report(tmp_path))
    choice = backend.choose("nf4_linear")
    assert (choice.path, choice.reason) == ("composed", "as measured on 910B3: the kernel does not hold in float16")
    assert backend.choose("lora_delta").path == "ascend"
    monkeypatch.setenv("MINDLORA_BACKEND_NF4_LINEAR", "ascend")
    assert backend.choose("nf4_linear").path == "ascend"


def test_the_border_of_one_pass_is_the_measured_one(tmp_path):
    from mindlora.network.cells.low_rank import _one_pass_tokens

    assert (_one_pass_tokens("ascend"), _one_pass_tokens("cpu")) == (8, 64)
    measured.adopt(report(tmp_path))
    assert (_one_pass_tokens("ascend"), _one_pass_tokens("cpu")) == (16, 64)
    measured.adopt(report(tmp_path, choices={"composed": {}, "one_pass_tokens": None}))
    assert _one_pass_tokens("ascend") == 8


def test_a_measured_draw_of_a_core_counts_in_the_estimate_of_a_cells_path(tmp_path, library):
    sizes = (512, 4096, 4096, 64, 2)
    least, before, plain = backend.lora_delta_times(*sizes)
    measured.adopt(report(tmp_path, choices={"composed": {}, "draw_tenths": 30}))
    assert backend.lora_delta_times(*sizes)[::2] == (least, plain)
    assert backend.lora_delta_times(*sizes)[1] < before
