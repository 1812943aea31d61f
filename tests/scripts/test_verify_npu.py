"""scripts/verify_npu.sh up to where CANN is missing, with a made-up CANN, and its comparisons, on a CPU."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.support.bare_python import HIDE
from tests.support.made_up_cann import made_up_cann

SCRIPTS = os.path.join(ROOT, "scripts")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.fixture
def verify(tmp_path):
    """Runs the script of a checkout on a machine without CANN, or with that in tmp_path/cann."""

    def call(*arguments, root=ROOT, **variables):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND", "MINDLORA"))}
        environment.update(MINDLORA_CANN_FOLDERS=str(tmp_path / "nowhere"), MINDLORA_TEST_LOG=str(tmp_path / "log"))
        environment.update(PYTHON=sys.executable, **variables)
        if (tmp_path / "cann").exists():
            environment["ASCEND_HOME_PATH"] = str(tmp_path / "cann")
        script = os.path.join(root, "scripts", "verify_npu.sh")
        command = ["bash", script, *arguments, "--output", str(tmp_path / "out")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return result, tmp_path / "out"

    return call


@pytest.fixture
def checkout(tmp_path):
    """A checkout of its own, since the build writes into it; without what would build a module, for a minute."""
    for name in ("scripts", "ops"):
        shutil.copytree(os.path.join(ROOT, name), tmp_path / "checkout" / name)
    (tmp_path / "checkout/mindlora").mkdir()
    shutil.copy(os.path.join(ROOT, "mindlora/__init__.py"), tmp_path / "checkout/mindlora")
    return str(tmp_path / "checkout")


def states(folder):
    return {step["name"]: step["state"] for step in json.loads((folder / "report.json").read_text())["steps"]}


def test_without_cann_each_step_says_why_it_does_not_run_and_the_next_one_follows(verify, tmp_path):
    result, folder = verify("--only", "build", "aclnn", "operators", "bench", "msprof")
    assert result.returncode == 1, result.stdout + result.stderr
    assert set(states(folder).values()) == {"not run"} and len(states(folder)) == 5
    page = (folder / "report.md").read_text()
    assert "Nothing could run here. Not run: build, aclnn, operators, bench, msprof." in page
    assert "There is no NPU here, so this page says nothing about the kernels." in page
    assert "| aclnn | not run | no NPU: there is no /dev/davinci0; no CANN toolkit was found" in page
    assert "| build | not run | no CANN toolkit was found" in page and "| no NPU: there is no /dev/davinci0 |" in page
    for op in ("lora_delta", "lora_linear", "nf4_linear", "multi_lora_delta", "multi_lora_slot_write"):
        assert f"MINDLORA_BACKEND_{op.upper()}=composed" in page
    for text in (page, (folder / "report.json").read_text(), (folder / "logs/build.log").read_text()):
        assert str(tmp_path) not in text and ROOT not in text


def test_a_folder_that_holds_something_is_not_written_to(verify, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").touch()
    result, folder = verify()
    assert result.returncode == 2 and "is not empty: name a new folder." in result.stderr
    assert os.listdir(folder) == ["mine"]


def test_a_folder_that_cannot_be_made_is_one_line(verify, tmp_path):
    (tmp_path / "out").touch()
    result, _ = verify("--only", "build")
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.endswith("out cannot be written to (Not a directory): name another folder with --output.\n")


def test_an_environment_of_cann_that_ends_in_a_false_test_ends_nothing(verify, tmp_path):
    """CANN's own set_env.sh is not written for a shell that stops at the first command that fails."""
    (tmp_path / "cann").mkdir()
    (tmp_path / "cann/set_env.sh").write_text('false\n[ -n "$ASCEND_UNSET" ]\n')
    result, folder = verify("--only", "build")
    assert result.returncode == 1 and states(folder) == {"build": "does not hold"}
    assert "names the version of CANN" in result.stdout


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize("code, state", [(None, "holds"), ("message(FATAL_ERROR broken)", "does not hold")])
def test_with_a_made_up_cann_the_build_is_judged(verify, checkout, tmp_path, code, state):
    made_up_cann(tmp_path, "8.5.0", **({"cmake_code": code} if code else {}))
    result, folder = verify("--only", "build", "aclnn", "--soc", "ascend910b", root=checkout)
    # The package that the made-up CANN makes is empty: nothing to try if the build failed, and a failure if it held.
    aclnn = "does not hold" if state == "holds" else "not run"
    assert states(folder) == {"build": state, "aclnn": aclnn}, result.stdout + result.stderr
    assert result.returncode == 1
    if state == "holds":
        assert "units ascend910b\n" in (tmp_path / "log").read_text()
    else:
        assert "broken" in (folder / "logs/build.log").read_text()


def test_a_cann_that_is_too_old_does_not_make_the_kernels_wrong(verify, checkout, tmp_path):
    made_up_cann(tmp_path, "8.0.RC3")
    result, folder = verify("--only", "build", root=checkout)
    assert result.returncode == 1 and states(folder) == {"build": "not run"}
    assert "CANN 8.0.RC3 was found" in (folder / "report.md").read_text()


# As a make rule calls CANN's compiler.
NO_BISHENG = """add_custom_target(binary ALL COMMAND sh -c "bisheng --version")
add_custom_target(package)
foreach(NAME npu_op_package npu_op_code_gen npu_op_library npu_op_kernel_sources npu_op_kernel_options
        npu_op_kernel_library npu_op_package_add)
    function(${NAME})
    endfunction()
endforeach()
"""


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
@pytest.mark.parametrize(
    "code, said",
    [
        (None, r"the build was not configured: CMake Error at CMakeLists.txt:\d+ .find_package.: .* ASCConfig.cmake"),
        ("message(FATAL_ERROR broken)", "the build was not configured: CMake Error at .* broken"),
        (NO_BISHENG, r"the build failed: sh: (1: |line 1: )?bisheng: (command )?not found\."),
    ],
)
def test_the_first_error_of_the_build_stands_before_any_advice(verify, checkout, tmp_path, code, said):
    made_up_cann(tmp_path, "8.5.0", cmake_code=code or "")
    if code is None:
        (tmp_path / "cann/compiler/tikcpp/ascendc_kernel_cmake/ASCConfig.cmake").unlink()
    result, folder = verify("--only", "build", root=checkout)
    (row,) = [line for line in (folder / "report.md").read_text().splitlines() if line.startswith("| build | does")]
    assert result.returncode == 1 and re.search(said, row), row
    assert "pip install" not in row or re.search(said + ".*pip install", row)


def test_what_is_missing_is_one_line_before_the_first_step(verify, checkout, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "sed", "dirname", "basename", "sort", "head", "uname", "grep"):
        (tools / name).symlink_to(shutil.which(name))
    (tools / "python3").symlink_to(sys.executable)
    made_up_cann(tmp_path, "8.5.0")
    result, folder = verify("--only", "library", "build", root=checkout, PATH=str(tools))
    first, *others = result.stdout.splitlines()
    assert first.startswith(
        "missing: g++: install it (Debian, Ubuntu: apt-get install g++); cmake: install it (3.16 or"
    )
    assert f"- {first}\n" in (folder / "report.md").read_text()
    assert others[1].startswith("build  ") and "cmake was not found: install it" in others[1]
    assert result.returncode == 1 and states(folder)["build"] == "not run"


@pytest.mark.parametrize(
    "states_of_steps, named, code",
    [
        ([("holds", False)], False, 0),
        ([("holds", False), ("does not hold", False)], False, 1),
        ([("holds", False), ("not run", False)], False, 1),
        # For want of NPUs, in a run of all steps and in one that asks for this one.
        ([("holds", False), ("not run", True)], False, 0),
        ([("holds", False), ("not run", True)], True, 1),
    ],
)
def test_the_exit_code_says_whether_all_that_was_asked_for_holds(states_of_steps, named, code):
    from verify_npu import exit_code
    from verify_npu_run import Outcome

    outcomes = [Outcome("a", state, "", excused=excused) for state, excused in states_of_steps]
    assert exit_code(outcomes, named) == code


def test_an_untested_mindspore_is_named_in_the_row_of_the_doctor():
    from verify_npu_steps import what_doctor_found

    from mindlora.cli.doctor import installation
    from mindlora.cli.doctor.report import DoctorReport, Item

    (finding,) = installation._check_pair("2.8.0", "1.7.0")
    report = DoctorReport((Item("CANN", "8.5.0"), Item("driver", "25.0")), (finding,))
    line = what_doctor_found(str(report))
    assert line.startswith(
        "no errors; warning: MindSpore 2.8.0 and MindFormers 1.7.0 were not tested together. -> Tested"
    )
    assert line.endswith("; CANN 8.5.0, driver 25.0; the log names all versions and the path of each operator")


def checked(op, dtype, monkeypatch):
    """Returns the result of the quick cases of an operator in graph mode."""
    from verify_npu_operators import run_cases

    monkeypatch.setenv("MINDLORA_BACKEND", "cpu")
    result = {"cases": 0, "worst": 0.0, "failures": []}
    run_cases(argparse.Namespace(operator=op, dtype=dtype, quick=True, device="CPU", json=None), "graph", result)
    return result


@pytest.mark.parametrize(
    "op, dtype, cases",
    [
        ("lora_delta", "float16", 10),
        ("lora_linear", "bfloat16", 11),
        ("nf4_linear", "float32", 6),
        ("multi_lora_delta", "bfloat16", 10),
        ("multi_lora_slot_write", "float16", 4),
    ],
)
def test_the_operators_hold_on_a_cpu(library, graph_mode, monkeypatch, op, dtype, cases):
    result = checked(op, dtype, monkeypatch)
    assert result["failures"] == [] and result["cases"] == cases and result["worst"] <= 1


def test_a_kernel_that_computes_something_else_does_not_hold(library, graph_mode, monkeypatch):
    from mindlora.ops import MultiLoraSlotWrite

    def construct(self, pool, ranks, scales, slot, packed, scale):
        return self.kernel(pool, ranks, scales, slot, packed, scale * 2)

    monkeypatch.setattr(MultiLoraSlotWrite, "construct", construct)
    failures = checked("multi_lora_slot_write", "float32", monkeypatch)["failures"]
    assert len(failures) == 4
    assert failures[1] == {
        "case": "graph: rank 1, 37 + 53, slot 3 of 4",
        "problem": "result 2 differs in 1 of 4 numbers, first at (3,): 1.5, not 0.75",
    }


@pytest.mark.parametrize(
    "found, highest, problem",
    [
        ([1.0, 2.0], 2.0, None),
        ([1.0, 2.05], 2.1, None),
        ([1.0, 2.2], 2.1, "differs in 1 of 2 numbers, first at (1,): 2.2, not 2 to 2.1"),
        ([1.0, 2.1], 2.0, "first at (1,): 2.1, not 2"),
        ([1.0, np.nan], 2.1, "first at (1,): nan, not 2 to 2.1"),
        ([1.0, 2.0], np.nan, "first at (1,): 2, not nan"),
        ([1.0, np.nan], np.nan, None),
        ([1.0], 2.0, "result 0 has shape (1,), not (2,)"),
    ],
)
def test_what_counts_as_equal(found, highest, problem):
    from verify_npu_cases import Case
    from verify_npu_operators import compare

    case = Case("", lambda: [], [(np.array([1.0, 2.0 if highest > 0 else highest]), np.array([1.0, highest]))])
    _, said = compare(case, [np.array(found)])
    assert (said is None) == (problem is None) and (problem or "") in (said or "")


def test_a_number_that_may_be_spoiled_must_not_be_a_wrong_one():
    from verify_npu_cases import Case
    from verify_npu_operators import compare

    case = Case("", lambda: [], [(np.ones(2), np.ones(2))], may_spoil=np.array([True, False]))
    assert compare(case, [np.array([np.nan, 1])])[1] is None
    assert "first at (0,): 3, not 1" in compare(case, [np.array([3.0, 1])])[1]


def test_an_error_is_quoted_from_its_first_line_with_words():
    from verify_npu_operators import first_words

    assert first_words(RuntimeError("\n-----\n- Ascend Error Message:\n-----\n")) == "- Ascend Error Message:"
    assert first_words(RuntimeError("no kernel\nmore")) == "no kernel"
    assert first_words(RuntimeError()) == ""


def test_python_on_path_is_the_one_that_was_named(monkeypatch, tmp_path):
    from verify_npu import path_with_this_python

    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        for name in ("python", "python3"):
            shutil.copy(shutil.which("true"), folder / name)
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    assert path_with_this_python(f"{there}:{here}") == f"{here}:{there}:{here}"
    assert path_with_this_python(f"{here}:{there}") == f"{here}:{there}"
    (there / "python").unlink()
    assert path_with_this_python(f"{there}:{here}") == f"{here}:{there}:{here}"  # python3 is another


def test_logs_lose_names_paths_and_addresses(monkeypatch):
    import verify_npu_run

    monkeypatch.setattr(verify_npu_run.socket, "gethostname", lambda: "vm")
    clean = verify_npu_run.Cleaner({"/data/run1": "<work>"})
    text = f"vm at 10.1.2.3 and 127.0.0.1: {ROOT}/ops/a.cc, /data/run1/x.log, /data/run12/y.log, a/b and 1/2"
    assert clean(text) == (
        "<name> at <address> and 127.0.0.1: <checkout>/ops/a.cc, <work>/x.log, <path>/y.log, a/b and 1/2"
    )
    assert clean("PATH=/data/ours/bin:/data/yours/bin, https://gitee.com/a/b") == (
        "PATH=<path>/bin:<path>/bin, https://gitee.com/a/b"
    )
    assert clean("fe80::f816:3eff:fe5d:1 of fa:16:3e:5d:aa:01, not of 10.1.2.3.") == (
        "<address> of <address>, not of <address>."
    )
    kept = "CANN 7.7.0.1.238 at /usr/local/Ascend/latest, 12:34:56.430, mindspore::ad::Grad"
    assert clean(kept) == kept


def test_the_page_names_what_failed_and_how_to_switch_it_off():
    from verify_npu_page import page
    from verify_npu_run import FAILED, HELD, Outcome

    failed = {"operator": "lora_delta", "cases": 3, "failures": [{"case": "graph: 8 tokens", "problem": "differs"}]}
    outcomes = [
        Outcome("lora_delta float32", HELD, "fine", figures={"operator": "lora_delta"}),
        Outcome("lora_delta float16", FAILED, "1 of 3 cases", figures=failed),
        Outcome("nf4_linear float32", HELD, "fine", figures={"operator": "nf4_linear"}),
    ]
    text = page({"device": "Ascend"}, outcomes)
    assert "1 of 3 steps that could run do not hold: lora_delta float16." in text
    assert "## lora_delta float16: 1 of 3 cases do not hold\n\n- graph: 8 tokens: differs\n" in text
    assert "| lora_delta | LoraDelta | does not hold | `MINDLORA_BACKEND_LORA_DELTA=composed` |" in text
    assert "| nf4_linear | Nf4Dequantize | holds |" in text and "| lora_linear | LoraLinear | not run |" in text


def test_the_switches_are_those_that_mindlora_reads():
    from verify_npu_page import KERNELS, switch

    from mindlora.ops import backend

    assert {op: kernel for op, (kernel, _) in KERNELS.items()} == {
        op: kernel for op, kernel in backend.ASCEND_OP_TYPES.items() if kernel
    }
    assert all(switch(op) == f"{backend.switch(op)}=composed" for op in KERNELS)


NPU_SMI = """
| 0     Ascend910           | OK            | 91.0        36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3401 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
"""
IDLE = "| No running processes found in NPU {}                                                            |\n"
BUSY = "| {}       {}                 | 1333928       |                          | 37709                   |\n"


@pytest.mark.parametrize(
    "rows, seen, free",
    [
        ([IDLE.format(0), BUSY.format(1, 0), IDLE.format(2), IDLE.format(3)], 4, ["0", "2", "3"]),
        # Two chips on each, as on Atlas A3.
        ([BUSY.format(0, 1), BUSY.format(0, 1), IDLE.format(1)], 4, ["0", "2", "3"]),
        # In a container that has some of them, CANN counts from 0.
        ([IDLE.format(4), BUSY.format(6, 0)], 2, ["0"]),
        ([BUSY.format(0, 0), BUSY.format(1, 0)], 2, []),
        ([IDLE.format(0), IDLE.format(1)], 3, None),
        ([], 8, None),
    ],
)
def test_npus_without_a_process_are_free(rows, seen, free):
    from verify_npu_devices import free_npus

    assert free_npus(NPU_SMI + "".join(rows), seen) == free


def place_with(tmp_path, npus):
    from verify_npu_report import Report
    from verify_npu_run import Cleaner
    from verify_npu_steps import Place

    (tmp_path / "logs").mkdir()
    given = argparse.Namespace(device="Ascend", output=str(tmp_path), quick=True, limit=None)
    report = Report(str(tmp_path), {}, [], "Ascend", Cleaner({}))
    return Place(given, str(tmp_path), dict(os.environ), Cleaner({}), npus, report, tuned=str(tmp_path))


@pytest.mark.parametrize(
    "seen, free, line",
    [
        (0, None, "it needs two free NPUs; here: none"),
        (2, ["1"], "it needs two free NPUs; here: 2, free: 1 (npu-smi)"),
        (8, None, "; name two in ASCEND_RT_VISIBLE_DEVICES"),
    ],
)
def test_two_devices_without_two_free_npus_is_not_run(tmp_path, seen, free, line):
    from verify_npu_devices import Npus
    from verify_npu_steps import two_devices

    (outcome,) = two_devices(place_with(tmp_path, Npus(seen, free, "npu-smi")))
    assert outcome.state == "not run" and outcome.line.endswith(line)


@pytest.mark.parametrize(
    "script, log, state, line",
    [
        ("exit 0", "", "holds", "both workers ended well, on NPUs 3 and 5"),
        ("echo broken; exit 1", "Error", "does not hold", "exit code 1; last line: broken"),
        ("exit 1", "Out of Memory!!! Request memory size: 1", "not run", "an NPU has too little memory left"),
    ],
)
def test_two_devices_takes_free_npus_and_a_free_port(tmp_path, monkeypatch, script, log, state, line):
    import verify_npu_steps
    from verify_npu_devices import Npus

    (tmp_path / "checkout/scripts").mkdir(parents=True)
    launcher = tmp_path / "checkout/scripts/msrun_launcher.sh"
    launcher.write_text(f'echo "$ASCEND_RT_VISIBLE_DEVICES $2 $3" > {tmp_path}/called; {script}\n')
    monkeypatch.setattr(verify_npu_steps, "ROOT", str(tmp_path / "checkout"))
    for name in ("cache_1/dialogues.mindrecord", "cache_1/Llama-tiny", "msrun/worker_0.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(log)
    (outcome,) = verify_npu_steps.two_devices(place_with(tmp_path, Npus(8, ["3", "5", "6"], "npu-smi")))
    assert outcome.state == state and outcome.line.startswith(line)
    devices, workers, port = (tmp_path / "called").read_text().split()
    assert (devices, workers) == ("3,5", "2") and port != "8118"


def test_the_doctor_after_the_build_must_name_the_kernels():
    from verify_npu_run import FAILED, HELD, Outcome
    from verify_npu_steps import judge_paths, operator_paths

    text = "LoRADense   ascend    x\nlora_delta  ascend    LoraDelta in Ascend C\nnf4_linear  {}  why\n"
    for path, on_npu, state in (("ascend  ", True, HELD), ("composed", True, FAILED), ("composed", False, HELD)):
        outcome = Outcome("doctor-after", HELD, "")
        judge_paths(outcome, operator_paths(text.format(path)), on_npu)
        assert outcome.state == state, (path, outcome.line)
    assert outcome.line == "lora_delta: ascend, nf4_linear: composed"


def test_the_fine_tune_names_its_path_and_must_take_kernels_that_were_built():
    from verify_npu_run import FAILED, HELD, Outcome
    from verify_npu_steps import name_paths

    log = "2026-01-01 INFO - Path of lora_delta for 14 cells: {}, the kernels are not registered.\n"
    for path, built, state in (("ascend", True, HELD), ("composed", True, FAILED), ("composed", False, HELD)):
        outcome = Outcome("fine-tune", HELD, "loss from 5 to 3")
        name_paths(outcome, log.format(path), built)
        assert outcome.state == state
        assert outcome.line.startswith(f"loss from 5 to 3; path of lora_delta: {path} on 14 cells")


def test_python3_alone_is_enough_and_an_old_python_is_passed_over(tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "python").write_text("#!/bin/sh\nexit 1\n")
    (folder / "python").chmod(0o755)
    (folder / "python3").symlink_to(sys.executable)
    command = f'set -eu; source {ROOT}/scripts/cann.sh; find_python; echo "$PYTHON"'

    def find(**variables):
        return subprocess.run(
            [shutil.which("bash"), "-c", command], env=variables, capture_output=True, text=True, check=False
        )

    assert find(PATH=str(folder)).stdout == "python3\n"
    (folder / "python3").unlink()
    result = find(PATH=str(folder))
    assert result.returncode == 1
    assert result.stderr.startswith("error: no Python 3.9 or newer was found (tried: python python3).")


def compared(op, dtype, state):
    from verify_npu_run import Outcome

    return Outcome(f"{op} {dtype}", state, "", figures={"operator": op, "dtype": dtype})


def bench_table(tokens, one_pass, two_steps):
    from verify_npu_choices import ONE_PASS, TWO_STEPS

    seconds = {side: {"wall": {"median": value}} for side, value in ((ONE_PASS, one_pass), (TWO_STEPS, two_steps))}
    return {"title": f"forward, 4 layers 2048 x 2048, rank 16, {tokens} tokens", "seconds": seconds}


def test_a_kernel_that_does_not_hold_is_a_choice():
    from verify_npu_choices import choices, section
    from verify_npu_run import FAILED, HELD, NOT_RUN

    outcomes = [compared("lora_delta", "float32", HELD), compared("lora_delta", "float16", FAILED)]
    chosen = choices(outcomes, "Ascend")
    assert chosen["composed"] == {"lora_delta": "the kernel does not hold in float16"}
    assert {number for name, number in chosen.items() if name != "composed"} == {None}
    assert "- lora_delta: MindSpore's own operators, because the kernel does not hold in float16" in section(chosen)
    assert choices(outcomes, "CPU") is None and section(None) == []
    assert choices([compared("lora_delta", "float16", NOT_RUN)], "Ascend") is None


@pytest.mark.parametrize(
    "tables, most",
    [
        ([(1, 1, 2), (4, 1, 2), (8, 3, 2), (16, 1, 2)], 4),
        ([(1, 1, 2), (1, 3, 2)], 0),  # of two widths
        ([(1, 1, 2), (4, 1, 2)], 4),
        ([], None),
    ],
)
def test_the_border_of_one_pass_is_where_it_is_no_longer_faster(tables, most):
    from verify_npu_choices import choices
    from verify_npu_run import HELD, Outcome

    others = [{"title": "switching", "seconds": {}}]
    bench = Outcome("bench", HELD, "", figures={"tables": [bench_table(*table) for table in tables] + others})
    assert choices([compared("lora_linear", "float16", HELD), bench], "Ascend")["one_pass_tokens"] == most


@pytest.mark.parametrize(
    "times, tenths",
    [
        ({2: 120, 4: 60, 8: 30, 12: 20, 16: 15, 20: 12, 24: 10}, 10),
        ({2: 120, 4: 60, 8: 30, 12: 20, 16: 15, 20: 15, 24: 15}, 15),
        # With more cores more is exchanged; two are fewer than any plan would take.
        ({2: 19, 8: 20, 12: 21, 24: 22}, 30),
        ({8: 20, 16: 20}, 20),
        ({24: 10}, None),
        ({}, None),
    ],
)
def test_a_core_draws_what_the_fewest_cores_need_to_be_as_fast_as_all(times, tenths):
    from verify_npu_choices import draw_tenths

    microseconds = {str(cores): {"512 tokens, rank 16": {"median": time}} for cores, time in times.items()}
    assert draw_tenths({"the plan": {}, **microseconds}) == tenths


def test_the_page_names_what_was_timed(library):
    from verify_npu_choices import choices, section
    from verify_npu_run import FAILED, HELD, Outcome

    times = {kind: {"8 tokens, rank 16": {"median": us}} for kind, us in (("vector", 10), ("cube", 12.5))}
    kinds = Outcome("ways kinds", HELD, "", figures={"part": "kinds", "microseconds": times})
    chosen = choices([kinds], "Ascend")
    # 2.5 us, and what the cube gains by the estimate.
    assert 2500 < chosen["mix_launch"] < 2700 and chosen["draw_tenths"] is None
    line = f"- a launch of cube and vector cores takes {chosen['mix_launch']} ns longer than one of vector cores"
    assert line in section(chosen)
    kinds.state = FAILED
    assert choices([kinds], "Ascend") is None


def test_the_doctor_adopts_what_a_page_measured(verify, tmp_path, monkeypatch, capsys):
    """On a machine without an NPU there is nothing to adopt; what a page with choices says, doctor shows."""
    from verify_npu_choices import choices
    from verify_npu_run import FAILED

    from mindlora import cli
    from mindlora.ops import measured

    monkeypatch.setattr(measured, "FILE", str(tmp_path / "kept/measured.json"))
    _, folder = verify("--only", "msprof", "--name", "rack 7")
    assert cli.main(["doctor", "--adopt", str(folder)]) == 1
    assert "compared no operator on an NPU" in capsys.readouterr().err
    report = json.loads((folder / "report.json").read_text())
    report["choices"] = choices([compared("nf4_linear", "float16", FAILED)], "Ascend")
    (folder / "report.json").write_text(json.dumps(report))
    assert cli.main(["doctor", "--adopt", str(folder), "--json"]) == 0
    (item,) = [item for item in json.loads(capsys.readouterr().out)["machine"] if item["name"] == "measured"]
    assert item["value"] == "rack 7"
    assert item["detail"].startswith("nf4_linear composed, because the kernel does not hold in float16; on an NPU (")


def test_a_python_without_anything_is_named(verify, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden={"numpy"}))
    _, folder = verify("--only", "doctor", PYTHONPATH=str(tmp_path))
    assert states(folder) == {"doctor": "not run"}
    line = "No module named 'numpy': this Python lacks what `pip install .` brings; name another one in PYTHON"
    assert line in (folder / "report.md").read_text()


def test_losses_on_the_device_are_those_on_a_cpu_or_it_does_not_hold():
    from verify_npu_run import FAILED, HELD, Outcome
    from verify_npu_steps import compare_losses

    for found, state in (
        ([5.01, 3.1], HELD),
        ([5.2, 3.1], FAILED),
        ([5.0, 3.4], FAILED),
        ([5.0, float("nan")], FAILED),
        ([5.0], FAILED),
    ):
        outcome = Outcome("fine-tune", HELD, "")
        compare_losses(outcome, [5.0, 3.0], found)
        assert outcome.state == state, found


def test_kernel_times_come_from_msprofs_table(tmp_path):
    from verify_npu_steps import kernel_times

    (tmp_path / "PROF_1/mindstudio_profiler_output").mkdir(parents=True)
    rows = "Op Name,OP Type,Task Duration(us)\na,LoraDelta,3.0\nb,LoraDelta,5.0\nc,MatMulV2,9\nd,Cast,1\n"
    (tmp_path / "PROF_1/mindstudio_profiler_output/op_summary_1.csv").write_text(rows)
    assert kernel_times(str(tmp_path)) == {
        "LoraDelta": {"median": 4.0, "min": 3.0, "calls": 2},
        "MatMulV2": {"median": 9.0, "min": 9.0, "calls": 1},
    }
