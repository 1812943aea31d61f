"""The programs ops/<operator>/ascendc/check.cpp and scripts/check_aclnn.sh, with a stand-in for CANN and an NPU.

The stand-in (tests/support/cann_stand_in.py) runs the operators' own host sides, and their kernels in the simulator.
"""

import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support import cann_stand_in
from tests.support.ascendc_model import kernels
from tests.support.bare_python import bare_environment

# The dtype with which each program's options and messages are tried.
DTYPES = {
    "lora_delta": "float16",
    "lora_linear": "bfloat16",
    "multi_lora_delta": "bfloat16",
    "multi_lora_slot_write": "float32",
    "nf4_dequantize": "bfloat16",
}


def checkout(folder):
    """A checkout of its own, since the script builds into it."""
    (folder / "checkout/scripts").mkdir(parents=True)
    for name in ("cann.sh", "check_aclnn.sh"):
        shutil.copy(os.path.join(ROOT, "scripts", name), folder / "checkout/scripts")
    (folder / "checkout/ops").symlink_to(os.path.join(ROOT, "ops"))


@pytest.fixture(scope="module")
def place(tmp_path_factory, stand_in):
    """A checkout of its own with the built programs, beside the stand-in and the simulator's kernels."""
    folder = tmp_path_factory.mktemp("aclnn")
    (folder / "kernels").mkdir()
    for op, dtype in itertools.product(DTYPES, kernels.ELEMENTS):
        (folder / "kernels" / f"{op}_{dtype}.so").symlink_to(kernels.build(op, dtype)[0].path)
    checkout(folder)
    for name in ("cann", "package"):
        (folder / name).symlink_to(stand_in[name])
    return folder


def environment(place, **variables):
    """The environment of a machine with the stand-in, its package on CANN's path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND", "MINDLORA"))}
    kept.update(PYTHON=sys.executable, MINDLORA_STAND_IN_KERNELS=str(place / "kernels"))
    kept.update(ASCEND_HOME_PATH=str(place / "cann"), ASCEND_CUSTOM_OPP_PATH=f"{place}/package")
    return {**kept, **variables}


def script(place, *arguments, folder=None, **variables):
    command = ["bash", str((folder or place) / "checkout/scripts/check_aclnn.sh"), *arguments]
    variables = environment(place, **variables)
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(place):
    """The programs, built by the script."""
    result = script(place, "--build-only")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "g++" not in result.stderr and "export ASCEND_CUSTOM_OPP_PATH=" in result.stdout
    return place / "checkout/build/aclnn_check"


@pytest.fixture
def run(place, built):
    """Runs the program of an operator on files."""

    def call(op, *arguments, **variables):
        libraries = f"{place}/package/op_api/lib:{place}/cann/lib64"
        return subprocess.run(
            [str(built / op), *map(str, arguments)],
            env=environment(place, LD_LIBRARY_PATH=libraries, **variables),
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def files(built, op):
    """The golden files of one dtype, the smaller half of them."""
    found = sorted((built / "golden" / op).glob(f"{DTYPES[op]}_*.golden"), key=lambda path: path.stat().st_size)
    return found[: len(found) // 2]


@pytest.mark.parametrize("op", DTYPES)
def test_every_kernel_gives_what_its_reference_gives_in_all_files(run, built, op):
    cases = sorted((built / "golden" / op).glob("*.golden"))
    result = run(op, *cases)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    kind = cann_stand_in.op_type(op)
    assert lines[0] == f"{kind} on device 0 (StandIn)" and lines[-1] == f"{kind}: {len(cases)} cases, 0 failed"
    assert lines[1:-1] == [f"{word} {path.stem}" for path in cases for word in ("TRY ", "PASS")]
    assert {path.stem.partition("_")[0] for path in cases} == {"float32", "float16", "bfloat16"}


def test_the_files_reach_the_vector_and_the_cube_kernel_of_each_operator(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "ops", "ascendc_check"))
    from golden import RANKS, SIZES

    for op, sizes in (
        ("lora_delta", SIZES),
        ("lora_linear", [(*shape, 1) for shape in SIZES]),
        ("multi_lora_delta", [(tokens, len(RANKS), max(RANKS), k, n) for tokens, k, n, _ in SIZES]),
    ):
        assert {kernels.plan(op, DTYPES[op], shape)[0].tiling_key for shape in sizes} == {1, 2}, op


def test_there_is_a_program_for_each_kernel():
    assert set(DTYPES) == set(cann_stand_in.operators())
    assert set(DTYPES) == {path.parts[-3] for path in pathlib.Path(ROOT, "ops").glob("*/ascendc/check.cpp")}


def changed(path, into, offset, replacement):
    """Writes a copy of a file with other bytes at an offset, counted from its end if that is negative."""
    data = bytearray(path.read_bytes())
    start = offset % len(data)
    data[start : start + len(replacement)] = replacement
    into.write_bytes(data)
    return into


def test_the_first_wrong_index_is_named_with_both_numbers(run, built, tmp_path):
    """The lowest and the highest numbers that are right, [3, 16] of float64 each, are the last bytes of the file."""
    source = built / "golden/lora_delta/float16_t3_k130_n16_r8.golden"
    lowest, highest = np.frombuffer(source.read_bytes()[-2 * 3 * 16 * 8 :], np.float64).reshape(2, 48)
    wrong = changed(source, tmp_path / "spoiled.golden", -19 * 8, np.float64(highest[29] + 100).tobytes())
    wrong = changed(wrong, wrong, -(48 + 19) * 8, np.float64(lowest[29] + 100).tobytes())
    wrong = changed(wrong, wrong, -5 * 8, np.float64(np.nan).tobytes())
    result = run("lora_delta", source, wrong)
    assert result.returncode == 1
    assert "PASS float16_t3_k130_n16_r8\n" in result.stdout and "LoraDelta: 2 cases, 1 failed\n" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL spoiled: y differs in 2 of 48 numbers, first at [1, 13]: got ")
    got, least, most = (float(text) for text in re.split("got |, expected | to ", line)[1:])
    assert (least, most) == pytest.approx((lowest[29] + 100, highest[29] + 100))
    assert lowest[29] <= got <= highest[29]


@pytest.mark.parametrize("op", ("lora_delta", "multi_lora_slot_write", "nf4_dequantize"))
def test_a_kernel_that_computes_something_else_fails(run, built, op):
    result = run(op, files(built, op)[0], MINDLORA_STAND_IN_SPOIL="1")
    assert result.returncode == 1 and " differs in 1 of " in result.stdout


def test_a_kernel_that_writes_to_an_input_fails(run, built):
    path = files(built, "lora_delta")[0]
    result = run("lora_delta", path, MINDLORA_STAND_IN_SPOIL="1:1")
    assert result.returncode == 1 and f"FAIL {path.stem}: x, an input, was written to\n" in result.stdout


def test_a_soak_compares_every_round_and_names_the_wrong_one(run, built):
    path = files(built, "lora_delta")[0]
    result = run("lora_delta", "--repeat", 5, path)
    assert result.returncode == 0 and f"PASS {path.stem} in each of 5 rounds\n" in result.stdout
    result = run("lora_delta", "--repeat", 5, path, MINDLORA_STAND_IN_SPOIL="3")
    assert result.returncode == 1 and f"FAIL {path.stem} in round 3: y differs in 1 of 53 numbers" in result.stdout


def test_what_a_round_left_behind_does_not_count_for_the_next(run, built):
    path = files(built, "lora_delta")[0]
    result = run("lora_delta", "--repeat", 3, path, MINDLORA_STAND_IN_SKIP="2")
    assert result.returncode == 1
    assert f"FAIL {path.stem} in round 2: y differs in 53 of 53 numbers, first at [0, 0]: got nan, " in result.stdout


def test_a_soak_wants_the_same_bits_in_every_round(run, built, tmp_path):
    """Where any number is right, the bits still differ."""
    path = files(built, "lora_delta")[0]
    ends = np.repeat([-1e300, 1e300], 53)
    generous = changed(path, tmp_path / "generous.golden", -2 * 53 * 8, ends.tobytes())
    spoiled = {"MINDLORA_STAND_IN_SPOIL": "4"}
    assert run("lora_delta", generous, "--repeat", 3, **spoiled).returncode == 0
    result = run("lora_delta", generous, "--repeat", 5, **spoiled)
    assert result.returncode == 1
    assert "in round 4: y does not have the bits of round 1, first at [0, 52]: got " in result.stdout


def test_a_shape_that_the_host_refuses_is_a_failed_case_with_canns_code(run, built, tmp_path):
    path = files(built, "lora_delta")[0]
    wrong = tmp_path / "wrong.golden"
    wrong.write_bytes(path.read_bytes().replace(b"in a float16 5,37\n", b"in a float16 37,5\n"))
    result = run("lora_delta", wrong, path)
    assert result.returncode == 1 and f"PASS {path.stem}\n" in result.stdout
    assert "FAIL wrong: aclnnLoraDeltaGetWorkspaceSize returned 561002\n" in result.stdout
    assert "mindlora lora_delta (ascend): K is 37 in one input and 5 in another.\n" in result.stderr


@pytest.mark.parametrize(
    "failure, code, said",
    [
        ("aclInit:500000", 2, "error: aclInit returned 500000: as the test asked.\n"),
        ("aclrtSetDevice:507033", 2, "error: aclrtSetDevice returned 507033: as the test asked.\n"),
        ("aclrtMalloc:207001", 1, "FAIL {}: aclrtMalloc returned 207001: as the test asked\n"),
        ("GetWorkspaceSize:161002", 1, "FAIL {}: aclnnLoraDeltaGetWorkspaceSize returned 161002: as the test asked\n"),
        (
            "aclrtSynchronizeStreamWithTimeout:107020",
            1,
            "FAIL {0}: aclrtSynchronizeStreamWithTimeout returned 107020: as the test asked\n"
            "error: the device is lost after {0}: no further file was tried.\n",
        ),
    ],
)
def test_an_error_of_cann_is_named_with_its_code(run, built, failure, code, said):
    first, second = files(built, "lora_delta")[:2]
    result = run("lora_delta", first, second, MINDLORA_STAND_IN_FAIL=failure)
    assert result.returncode == code and said.format(first.stem) in result.stdout + result.stderr
    assert (f" {second.stem}" in result.stdout) == (code == 1 and "Synchronize" not in failure)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["{missing}"], "{missing} cannot be read."),
        (["{short}"], "{short} is cut off: write it again with golden.py."),
        (["{other}"], "{other} has not the tensors of LoraDelta."),
        (["{text}"], "{text} is not a golden file."),
        ([], "no golden files were named; golden.py writes them."),
        (["--fast", "1"], "--fast is not an option. They are --repeat N, --device N, --timeout SECONDS, --acl FILE."),
        (["--repeat"], "--repeat needs a value."),
        (["--repeat", "many"], "--repeat needs a whole number, not many."),
        (["--repeat", "0", "{other}"], "--repeat must be 1 or more."),
    ],
)
def test_what_a_program_cannot_use_is_one_line(run, built, tmp_path, arguments, said):
    other = files(built, "lora_linear")[0]
    names = {name: tmp_path / name for name in ("missing", "short", "text")}
    names["short"].write_bytes(files(built, "lora_delta")[0].read_bytes()[:-1])
    names["text"].write_text("hello\n")
    result = run("lora_delta", *[word.format(other=other, **names) for word in arguments])
    assert result.returncode == 2
    assert result.stderr == "error: " + said.format(other=other, **names) + "\n"


@pytest.mark.parametrize(
    "variables, arguments, said",
    [
        (
            {"ASCEND_HOME_PATH": "", "MINDLORA_CANN_FOLDERS": "/nowhere"},
            (),
            "error: no CANN toolkit was found (looked for /nowhere). Install CANN 8.3 or newer and source its",
        ),
        (
            {"ASCEND_CUSTOM_OPP_PATH": "/elsewhere"},
            (),
            "error: no operator package of mindlora was found (looked for op_api/include/aclnn_lora_delta.h in /else",
        ),
        ({}, ("--package", "/there"), "error: no operator package of mindlora was found (looked for op_api/include/"),
        ({}, ("--fast",), "error: --fast is not an option."),
        ({}, ("--repeat",), "error: --repeat needs a value."),
        ({}, ("rms_norm",), "error: rms_norm is not an operator with a kernel."),
    ],
)
def test_what_the_script_cannot_do_is_one_line(place, variables, arguments, said):
    result = script(place, *arguments, **variables)
    assert result.returncode == 1 and result.stderr.startswith(said) and result.stderr.count("\n") == 1


def test_the_script_runs_all_dtypes_and_says_what_does_not_hold(place, tmp_path):
    checkout(tmp_path)
    arguments = ("nf4_dequantize", "--small", "--repeat", "2")
    result = script(place, *arguments, folder=tmp_path, MINDLORA_STAND_IN_SPOIL="7")
    assert result.returncode == 1 and result.stderr == "error: these do not hold: nf4_dequantize.\n"
    assert result.stdout.count("in each of 2 rounds\n") == 14 and "Nf4Dequantize: 15 cases, 1 failed" in result.stdout


def test_without_the_npus_driver_the_script_builds_and_says_what_is_missing(place, tmp_path):
    checkout(tmp_path)
    libraries = tmp_path / "cann/lib64"
    libraries.mkdir(parents=True)
    (tmp_path / "cann/include").symlink_to(cann_stand_in.STAND_IN / "include")
    (libraries / "hal.cpp").write_text("int hal;")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", "libascend_hal.so", "hal.cpp"], cwd=libraries, check=True)
    flags = ("-Wl,--no-as-needed", f"-L{libraries}", "-lascend_hal")
    cann_stand_in.library(libraries / "libascendcl.so", [cann_stand_in.STAND_IN / "runtime.cpp"], *flags)
    (libraries / "libnnopbase.so").symlink_to("libascendcl.so")
    (libraries / "libascend_hal.so").unlink()
    result = script(place, "lora_delta", "--small", folder=tmp_path, ASCEND_HOME_PATH=str(tmp_path / "cann"))
    assert result.returncode == 1 and (tmp_path / "checkout/build/aclnn_check/lora_delta").exists()
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "error: the programs need libascend_hal.so, which the NPU's driver brings: there is none here."
    )


@pytest.fixture
def verified(place, tmp_path):
    """Runs verify_npu.sh --only aclnn in a checkout with two operators, where no test package is."""
    root = tmp_path / "checkout"
    shutil.copytree(os.path.join(ROOT, "scripts"), root / "scripts")
    (root / "mindlora").mkdir()
    shutil.copy(os.path.join(ROOT, "mindlora/__init__.py"), root / "mindlora")
    (root / "ops").mkdir()
    for name in ("ascendc_check", "ascendc_common", "lora_delta", "multi_lora_slot_write"):
        (root / "ops" / name).symlink_to(os.path.join(ROOT, "ops", name))
    (tmp_path / "bare").mkdir()
    python_path = bare_environment(str(tmp_path / "bare"))["PYTHONPATH"]

    def call(folder, *arguments, **variables):
        command = ["bash", str(root / "scripts/verify_npu.sh"), "--quick", "--only", "aclnn", *arguments]
        command += ["--output", str(tmp_path / folder)]
        variables = {**environment(place), "PYTHONPATH": python_path, **variables}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        (step,) = json.loads((tmp_path / folder / "report.json").read_text())["steps"]
        return result, step, (tmp_path / folder / "report.md").read_text()

    return call


def test_the_page_of_verify_npu_tells_a_right_kernel_a_wrong_one_and_one_that_hangs(verified, tmp_path):
    result, step, page = verified("right")
    assert result.returncode == 0 and step["state"] == "holds", result.stdout + result.stderr
    assert (tmp_path / "right/logs/aclnn.log").read_text().endswith("All 2 operators hold.\n")
    assert "does not hold" not in page

    result, step, page = verified("wrong", MINDLORA_STAND_IN_SPOIL="7")
    assert result.returncode == 1 and step["state"] == "does not hold"
    assert step["line"].startswith("2 of 60 golden files, of LoraDelta, MultiLoraSlotWrite; ")
    assert "## aclnn: 2 of 60 cases do not hold\n\n- LoraDelta float16_t" in page
    assert re.search(r": y differs in 1 of \d+ numbers, first at \[\d+, \d+\]: got \S+, expected \S+ to \S+\n", page)
    for operator, state in (
        ("lora_delta", "does not hold"),
        ("multi_lora_slot_write", "does not hold"),
        ("lora_linear", "not run"),
    ):
        assert re.search(rf"\| {operator} \| \w+ \| {state} ", page), operator

    # The programs have been built.
    result, step, page = verified("hung", "--limit", "10", MINDLORA_STAND_IN_HANG="2")
    assert result.returncode == 1 and step["state"] == "does not hold"
    assert "it did not end within 10 s and was killed; last line: TRY  bfloat16_t" in step["line"]
    assert re.search(r"\n- LoraDelta bfloat16_t\w+: the program ended within it, or did not end\n", page)
