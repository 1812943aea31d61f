"""Which path is picked, what the report says about it, and the error if a forced path is not available."""

import gc
import os
import shutil

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from mindlora.core.errors import BackendError, LoraError
from mindlora.ops import LoraDelta, backend, backend_report, build, operator_cell
from mindlora.ops.paged_attention import PagedAttention
from mindlora.ops.rotary_embedding import RotaryEmbedding
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _unset(library, monkeypatch):
    monkeypatch.delenv("MINDLORA_BACKEND", raising=False)
    monkeypatch.delenv("MS_CUSTOM_AOT_WHITE_LIST", raising=False)


def choices():
    """Those of the operators that have more than one path."""
    return [choice for choice in backend_report().choices if choice.op not in backend.CPU_ONLY]


def paths():
    return {choice.op: choice.path for choice in choices()}


def reasons():
    return {choice.reason for choice in choices()}


def test_graph_mode_takes_the_library_and_pynative_plain_operators(mode):
    wanted = "cpu" if mode == ms.GRAPH_MODE else "composed"
    once = ("lora_dropout", "multi_lora_slot_write", "nf4_linear")
    assert paths() == {op: "cpu" if op in once else wanted for op in backend.OPS if op not in backend.CPU_ONLY}
    assert LoraDelta().choice.path == wanted
    assert set(backend.OPS) <= set(os.listdir(os.path.join(ROOT, "ops")))


def test_the_report_in_words(mode):
    lines = str(backend_report()).splitlines()
    assert [line.split()[0] for line in lines] == list(backend.OPS)
    if mode == ms.GRAPH_MODE:
        assert lines[0] == f"lora_delta              cpu       graph mode on a CPU, {build.LIBRARY}"
    else:
        assert lines[0] == (
            "lora_delta              composed  in PyNative a call to a custom operator costs more than "
            "it saves; 16-bit types are computed in float32 and cast back, as a CPU has no bfloat16 "
            "MatMul or Mul"
        )


@pytest.mark.parametrize("path", ["cpu", "composed"])
def test_a_path_can_be_forced(mode, monkeypatch, path):
    monkeypatch.setenv("MINDLORA_BACKEND", path)
    assert set(paths().values()) == {path}
    assert {reason.split(";")[0] for reason in reasons()} == {"MINDLORA_BACKEND asks for it"}


def test_one_operator_can_be_switched_off_by_itself(mode, monkeypatch):
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    monkeypatch.setenv("MINDLORA_BACKEND_LORA_DELTA", "composed")
    found = {choice.op: choice for choice in backend_report().choices}
    assert found.pop("lora_delta").path == LoraDelta().path == "composed"
    assert {choice.path for choice in found.values()} == {"cpu"}
    assert backend.choose("lora_delta").reason.startswith("MINDLORA_BACKEND_LORA_DELTA asks for it")
    monkeypatch.setenv("MINDLORA_BACKEND_LORA_DELTA", "off")
    with pytest.raises(BackendError, match="^MINDLORA_BACKEND_LORA_DELTA is 'off': it must be one of ascend, cpu"):
        LoraDelta()


@pytest.mark.parametrize(
    "value, message",
    [
        ("ascend", "MINDLORA_BACKEND is ascend, but device_target is CPU."),
        ("CPU", "MINDLORA_BACKEND is 'CPU': it must be one of ascend, cpu, composed, or unset."),
        ("gpu", "MINDLORA_BACKEND is 'gpu': it must be one of ascend, cpu, composed, or unset."),
    ],
)
def test_what_cannot_be_forced_is_an_error(mode, monkeypatch, value, message):
    monkeypatch.setenv("MINDLORA_BACKEND", value)
    for make in (backend_report, LoraDelta):
        with pytest.raises(BackendError) as error:
            make()
        assert str(error.value).startswith(message) and isinstance(error.value, LoraError)


def assert_cpu_is_out(monkeypatch, reason):
    """The reason is in the report; where the path is forced, in the error."""
    assert set(paths().values()) == {"composed"} and all(reason in found for found in reasons())
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    with pytest.raises(BackendError) as error:
        LoraDelta()
    assert str(error.value).startswith("MINDLORA_BACKEND is cpu, but ") and reason in str(error.value)


def test_a_missing_library(graph_mode, monkeypatch, tmp_path):
    monkeypatch.setattr(backend, "LIBRARY", str(tmp_path / "none.so"))
    assert_cpu_is_out(monkeypatch, f"{tmp_path}/none.so is missing: build it with `python -m mindlora.ops.build`")


def test_a_library_that_cannot_be_loaded(graph_mode, monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(b"not a library")
    monkeypatch.setattr(backend, "LIBRARY", str(tmp_path / "broken.so"))
    assert_cpu_is_out(monkeypatch, "broken.so cannot be loaded: ")


def test_a_library_for_which_the_loader_has_no_static_tls(graph_mode, monkeypatch, tmp_path):
    def refuse(path):
        raise OSError("libgomp.so.1: cannot allocate memory in static TLS block")

    (tmp_path / "late.so").write_bytes(b"")
    monkeypatch.setattr(backend, "LIBRARY", str(tmp_path / "late.so"))
    monkeypatch.setattr(backend.ctypes, "CDLL", refuse)
    reason = "late.so cannot be loaded: libgomp.so.1: cannot allocate memory in static TLS block; start Python with"
    assert_cpu_is_out(monkeypatch, f"{reason} LD_PRELOAD=libgomp.so.1")


def test_the_library_is_open_from_the_choice_on_and_stays_so(pynative_mode, monkeypatch, tmp_path):
    library = shutil.copy(build.LIBRARY, tmp_path / "copy.so")
    for module in (backend, operator_cell):
        monkeypatch.setattr(module, "LIBRARY", str(library))

    def holders():
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return sum(library.name in line for line in maps)

    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    assert holders() == 0
    backend.choose("lora_delta")
    opened = holders()
    assert opened > 0
    x = Tensor(np.ones((2, 2), np.float32))
    assert (LoraDelta()(x, x, x, x, Tensor(1.0, ms.float32)).asnumpy() == 5).all()
    gc.collect()
    assert holders() == opened


def test_a_library_of_another_version(graph_mode, monkeypatch):
    version = backend._LIBRARY_VERSION
    monkeypatch.setattr(backend, "_LIBRARY_VERSION", -1)
    backend._load_problem.cache_clear()
    assert_cpu_is_out(monkeypatch, f"is from another version of mindlora ({version}, not -1): build it again with")
    monkeypatch.undo()
    backend._load_problem.cache_clear()


def test_a_white_list_that_does_not_hold_the_library(graph_mode, monkeypatch, tmp_path):
    monkeypatch.setenv("MS_CUSTOM_AOT_WHITE_LIST", os.path.dirname(build.LIBRARY))
    assert set(paths().values()) == {"cpu"}
    monkeypatch.setenv("MS_CUSTOM_AOT_WHITE_LIST", str(tmp_path))
    assert_cpu_is_out(monkeypatch, f"MS_CUSTOM_AOT_WHITE_LIST ({tmp_path}) does not allow {build.LIBRARY}")


def test_on_ascend_a_cpu_library_is_no_path(monkeypatch):
    real = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else real(key))
    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    with pytest.raises(BackendError, match="MINDLORA_BACKEND is cpu, but device_target is Ascend[.]"):
        backend_report()


def cpu_only():
    """(path, reason) of each operator of serving, in the report."""
    return [(c.path, c.reason) for c in backend_report().choices if c.op in backend.CPU_ONLY]


@pytest.mark.parametrize("forced", ["", "cpu", "composed"])
def test_the_operators_of_serving_take_the_library_whatever_is_forced(mode, monkeypatch, forced):
    monkeypatch.setenv("MINDLORA_BACKEND", forced)
    assert cpu_only() == [("cpu", f"it has no other path, {build.LIBRARY}")] * len(backend.CPU_ONLY)
    assert RotaryEmbedding().path == PagedAttention().path == "cpu"


@pytest.mark.parametrize("forced", ["", "composed"])
def test_without_the_library_the_operators_of_serving_have_no_path(graph_mode, monkeypatch, tmp_path, forced):
    monkeypatch.setenv("MINDLORA_BACKEND", forced)
    monkeypatch.setattr(backend, "LIBRARY", str(tmp_path / "none.so"))
    problem = f"{tmp_path}/none.so is missing: build it with `python -m mindlora.ops.build`"
    assert cpu_only() == [("none", problem)] * len(backend.CPU_ONLY)
    for cell in (RotaryEmbedding, PagedAttention):
        with pytest.raises(BackendError) as error:
            cell()
        assert str(error.value) == (
            f"{cell.op} cannot run here: {problem}. Use it with device_target CPU and mindlora's library."
        )


def test_on_ascend_the_operators_for_a_cpu_are_mindspores_own(monkeypatch):
    real = ms.get_context
    monkeypatch.setattr(ms, "get_context", lambda key: "Ascend" if key == "device_target" else real(key))
    training = ("FlashAttentionScore", "RmsNorm")
    serving = ("GroupedMatmul", "ApplyRotaryPosEmb", "MatMul", "PagedAttention with ReshapeAndCache")
    owners = (*training, *serving, "MatMul", "MatMul")
    assert cpu_only() == [("none", f"on an NPU MindSpore's own {owner} runs") for owner in owners]
    with pytest.raises(BackendError, match="paged_attention cannot run here: on an NPU MindSpore's own PagedAttention"):
        PagedAttention()


def test_both_modules_mean_the_same_library():
    assert backend.LIBRARY == build.LIBRARY


def test_building(monkeypatch, tmp_path):
    library = tmp_path / "lib" / "library.so"
    assert not build.is_current(str(library))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="No C[+][+] compiler was found"):
        build.build(str(library))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match="false failed on the CPU operators"):
        build.build(str(library))
    assert not library.exists() and not list((tmp_path / "lib").iterdir())
    monkeypatch.setattr(build, "SOURCES", str(tmp_path))
    with pytest.raises(RuntimeError, match="The sources of the CPU operators are not in"):
        build.build(str(library))
