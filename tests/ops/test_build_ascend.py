"""scripts/build_ascend.sh with CANN missing, too old or faked: its messages, and its calls of CANN's CMake."""

import os
import platform
import shutil
import subprocess

import pytest

from tests.conftest import ROOT
from tests.support.ascendc_model.model import INCLUDE
from tests.support.made_up_cann import made_up_cann

NEEDS_CMAKE = pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")


@pytest.fixture
def run(tmp_path):
    """Runs the script with a toolkit in tmp_path/cann, or with none."""

    def call(*arguments, cann=True, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ASCEND")}
        environment.update(MINDLORA_CANN_FOLDERS=str(tmp_path / "nowhere"), MINDLORA_TEST_LOG=str(tmp_path / "log"))
        environment["PATH"] = f"{python3.parent}:{environment['PATH']}"
        environment.update(variables)
        if cann:
            environment["ASCEND_HOME_PATH"] = str(tmp_path / "cann")
        return subprocess.run(
            ["bash", str(tmp_path / "checkout/scripts/build_ascend.sh"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    # A Python that notes what it is asked. Only with MINDLORA_TEST_PYTHON=0 has it a MindSpore, and builds a module.
    python3 = tmp_path / "python/python3"
    python3.parent.mkdir()
    python3.write_text('#!/bin/sh\necho "$PWD $@" >> "$MINDLORA_TEST_LOG.python3"\nexit ${MINDLORA_TEST_PYTHON:-1}\n')
    python3.chmod(0o755)
    # A checkout of its own, since the script builds into it.
    (tmp_path / "checkout/scripts").mkdir(parents=True)
    for name in ("build_ascend.sh", "cann.sh"):
        shutil.copy(os.path.join(ROOT, "scripts", name), tmp_path / "checkout/scripts")
    shutil.copytree(os.path.join(ROOT, "ops"), tmp_path / "checkout/ops")
    return call


def assert_refused(result, message):
    """One line, on stderr, and an exit code."""
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1, result.stderr


def test_without_cann(run, tmp_path):
    assert_refused(
        run(cann=False),
        f"no CANN toolkit was found (looked for {tmp_path}/nowhere). Install CANN 8.3 or "
        "newer and source its set_env.sh.",
    )


@pytest.mark.parametrize("version", ["8.2.RC1", "8.0.RC3", "7.0.0"])
def test_an_old_cann(run, tmp_path, version):
    made_up_cann(tmp_path, version)
    assert_refused(run(), f"CANN {version} was found at {tmp_path}/cann: the kernels need 8.3 or newer.")


def test_a_cann_without_a_version(run, tmp_path):
    (tmp_path / "cann").mkdir()
    assert_refused(run(), f"no file below {tmp_path}/cann names the version of CANN")


def test_an_environment_that_ends_in_a_false_test(run, tmp_path):
    """CANN's own set_env.sh is not written for a shell that stops at the first command that fails."""
    made_up_cann(tmp_path, "8.2.RC1")
    (tmp_path / "cann/set_env.sh").write_text('false\n[ -n "$ASCEND_UNSET" ]\n')
    result = run(cann=False, MINDLORA_CANN_FOLDERS=str(tmp_path / "cann"))
    assert_refused(result, f"CANN 8.2.RC1 was found at {tmp_path}/cann: the kernels need 8.3 or newer.")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--soc", "ascend310p"],
            "no kernel of mindlora can be built for ascend310p: it has no DataCopyPad, no bfloat16",
        ),
        (["--soc", "ascend910b,ascend310p"], "no kernel of mindlora can be built for ascend310p"),
        (
            ["--soc", "ascend910"],
            "--soc names ascend910: it must be ascend910b (Atlas A2), ascend910_93 (Atlas A3), or",
        ),
        (["--soc"], "--soc needs a name"),
        (["--soc", " , "], "--soc names no NPU: it must be"),
        (["--install-path"], "--install-path needs a folder."),
        (["--kernel-options"], "--kernel-options needs a text."),
        (["--fast"], "--fast is not an option."),
    ],
)
def test_arguments_that_cannot_be_served(run, arguments, message):
    assert_refused(run(*arguments), message)


@NEEDS_CMAKE
@pytest.mark.parametrize(
    "version, file",
    [
        ("8.3.RC1", "x86_64-linux/ascend_toolkit_install.info"),
        ("[8.3.0.1:8.5.0]", "version.cfg"),
        ("9.0.0", "compiler/version.info"),
    ],
)
def test_what_is_built_and_where_it_goes(run, tmp_path, version, file):
    made_up_cann(tmp_path, version, file)
    result = run("--soc", "ascend910b,ascend910_93", "--install-path", str(tmp_path / "into"))
    assert result.returncode == 0, result.stdout + result.stderr
    vendor = tmp_path / "into/vendors/mindlora"
    assert (vendor / "bin/set_env.bash").exists() and f"source {vendor}/bin/set_env.bash" in result.stdout
    assert f"CANN {version.strip('[]').rpartition(':')[2]} at {tmp_path}/cann" in result.stdout
    log = (tmp_path / "log").read_text()
    ops = tmp_path / "checkout/ops"
    assert "units ascend910b;ascend910_93" in log
    for op, op_type in (
        ("lora_delta", "LoraDelta"),
        ("lora_linear", "LoraLinear"),
        ("multi_lora_delta", "MultiLoraDelta"),
        ("multi_lora_slot_write", "MultiLoraSlotWrite"),
        ("nf4_dequantize", "Nf4Dequantize"),
    ):
        assert (
            f"npu_op_kernel_sources ascendc_kernels OP_TYPE {op_type} KERNEL_DIR {op}/ascendc/op_kernel "
            f"KERNEL_FILE {op}.cpp\n"
        ) in log
        assert (ops / op / "ascendc/op_kernel" / f"{op}.cpp").exists()
        assert f"{ops}/{op}/ascendc/op_host/{op}.cpp" in log


@NEEDS_CMAKE
def test_a_machine_without_an_npu_and_its_driver_is_enough(run, tmp_path):
    made_up_cann(tmp_path, "8.5.0")
    stubs = tmp_path / "cann" / f"{platform.machine()}-linux/devlib"
    stubs.mkdir(parents=True)
    asked = tmp_path / "python/npu-smi"
    asked.write_text('#!/bin/sh\necho "$@" >> "$MINDLORA_TEST_LOG.npu-smi"\nexit 1\n')
    asked.chmod(0o755)
    result = run(LD_LIBRARY_PATH="/of/a/driver")
    assert result.returncode == 0, result.stdout + result.stderr
    assert not (tmp_path / "log.npu-smi").exists()
    # The driver's own libraries come before CANN's stubs of them.
    assert f"libraries /of/a/driver:{stubs}\n" in (tmp_path / "log").read_text()


@NEEDS_CMAKE
@pytest.mark.parametrize("has_mindspore", [True, False])
def test_the_module_for_pynative_is_built_where_there_is_a_mindspore(run, tmp_path, has_mindspore):
    made_up_cann(tmp_path, "8.5.0")
    result = run("--install-path", str(tmp_path / "into"), MINDLORA_TEST_PYTHON=str(int(not has_mindspore)))
    assert result.returncode == 0, result.stdout + result.stderr
    built = f"{tmp_path}/checkout -m mindlora.ops.build_pynative\n" in (tmp_path / "log.python3").read_text()
    note = "note: no module for PyNative was built: ops.Custom will call the kernels there.\n"
    assert built is has_mindspore and (note in result.stdout) is not has_mindspore


@NEEDS_CMAKE
def test_options_for_the_kernels_reach_their_compiler(run, tmp_path):
    made_up_cann(tmp_path, "8.5.0")
    assert run("--kernel-options", "-g -sanitizer", "--install-path", str(tmp_path / "into")).returncode == 0
    options = f"npu_op_kernel_options ascendc_kernels ALL OPTIONS -I{tmp_path}/checkout/ops -g -sanitizer\n"
    assert options in (tmp_path / "log").read_text()


@NEEDS_CMAKE
def test_kernels_find_their_headers_in_the_package_without_the_checkout(run, tmp_path):
    """As CANN compiles from a package's sources: with -I <vendor>_impl/ascendc/common, and no other folder of ours."""
    made_up_cann(tmp_path, "8.5.0")
    assert run("--install-path", str(tmp_path / "into")).returncode == 0
    shutil.rmtree(tmp_path / "checkout")
    sources = tmp_path / "into/vendors/mindlora/op_impl/ai_core/tbe/mindlora_impl"
    kernels = sorted((sources / "dynamic").glob("*/ascendc/op_kernel/*.cpp"))
    assert len(kernels) == 5
    for kernel in kernels:
        folders = [f"-I{INCLUDE}", f"-I{sources}/ascendc/common"]
        done = subprocess.run(
            ["g++", "-std=c++17", "-MM", *folders, kernel], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        used = [path for path in done.stdout.replace("\\\n", " ").split()[1:] if str(INCLUDE) not in path]
        assert len(used) > 2 and all(path.startswith(str(sources)) for path in used)
