"""scripts/build_ascend.sh with CANN missing, too old or faked: its messages, and its calls of CANN's CMake."""

import os
import shutil
import subprocess

import pytest

from tests.conftest import ROOT
from tests.support.made_up_cann import made_up_cann

SCRIPT = os.path.join(ROOT, "scripts", "build_ascend.sh")


@pytest.fixture
def run(tmp_path):
    """Runs the script with a toolkit in tmp_path/cann, or with none."""

    def call(*arguments, cann=True):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ASCEND")}
        environment.update(MINDLORA_CANN_FOLDERS=str(tmp_path / "nowhere"), MINDLORA_TEST_LOG=str(tmp_path / "log"))
        if cann:
            environment["ASCEND_HOME_PATH"] = str(tmp_path / "cann")
        return subprocess.run(
            ["bash", str(tmp_path / "checkout/scripts/build_ascend.sh"), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    # A checkout of its own, since the script builds into it.
    (tmp_path / "checkout/scripts").mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / "checkout/scripts")
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
        (["--install-path"], "--install-path needs a folder."),
        (["--fast"], "--fast is not an option."),
    ],
)
def test_arguments_that_cannot_be_served(run, arguments, message):
    assert_refused(run(*arguments), message)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
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
