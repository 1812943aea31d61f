"""The page of scripts/verify_npu.py: the steps' results, and how to switch each kernel off."""

from typing import Any, Dict, List, Sequence

from verify_npu_run import FAILED, HELD, NOT_RUN, RUNNING, Outcome

# Operator -> its kernel in CANN, and other operators that call it.
KERNELS = {
    "lora_delta": ("LoraDelta", ""),
    "lora_linear": ("LoraLinear", ""),
    "nf4_linear": ("Nf4Dequantize", ""),
    "multi_lora_delta": ("MultiLoraDelta", "multi_lora_linear uses it too"),
    "multi_lora_slot_write": ("MultiLoraSlotWrite", ""),
}

# The coverage of tests/ascend_backend and tests/ops/ascendc without an NPU. The kernels run in the functional model.
REHEARSED = {
    "doctor, library": "all of it, on a CPU",
    "build, doctor-after": "nothing: CANN's compiler was not at hand",
    "aclnn": "all golden files, by the stand-in alone, without MindSpore",
    "operators": "few shapes (--quick) of all operators in all dtypes, in graph mode and PyNative, with gradients; not "
    "lora_delta in 16 bits with NaN, which the model of the cube cores refuses",
    "fine-tune": "compiled, and its steps taken; kernels were not launched, so there was no loss to compare",
    "two-devices": "compiled as one rank of 8, and its steps taken; collectives moved no data",
    "bench, msprof, ways": "nothing: there are no times without an NPU",
}

NO_NPU = " There is no NPU here, so this page says nothing about the kernels."


def switch(op: str) -> str:
    """Returns the setting that replaces an operator's kernel with MindSpore's own operators."""
    return f"MINDLORA_BACKEND_{op.upper()}=composed"


def page(head: Dict[str, Any], outcomes: Sequence[Outcome], stopped: str = "", waiting: Sequence[str] = ()) -> str:
    """Returns the page in Markdown.

    Args:
        head (dict): The conditions of the result: versions, device, options.
        outcomes (sequence of Outcome): One for each step, in order.
        stopped (str): Why the run ended early. Default: "", it did not.
        waiting (sequence of str): Requested steps that have not begun. Default: none.
    """
    lines = ["# mindlora on this machine", ""]
    lines += [f"- {name}: {value}" for name, value in head.items()]
    lines += ["", *where(outcomes, stopped, waiting)]
    lines += [
        verdict(outcomes) + (NO_NPU if head.get("NPUs") == "none" and head.get("device") == "Ascend" else ""),
        "",
        "## Steps",
        "",
        "| step | result | what was seen | seconds | log |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {o.name} | {o.state} | {cell(o.line)} | {o.seconds:g} | {o.log} |" for o in outcomes]
    return "\n".join([*lines, *failures(outcomes), *switches(outcomes), *rehearsed(), ""])


def where(outcomes: Sequence[Outcome], stopped: str, waiting: Sequence[str]) -> List[str]:
    """Returns the paragraph about an unfinished run."""
    running = [outcome.name for outcome in outcomes if outcome.state == RUNNING]
    left = f" Not begun: {', '.join(waiting)}." if waiting else ""
    if stopped:
        return [f"**The run ended early: {stopped}.**{left}", ""]
    if running:
        text = (
            f"**The run is at {running[0]}.**{left} This page is written anew while it goes on: if it is older than a"
        )
        return [f"{text} minute and no such process is left, the run was killed there.", ""]
    return []


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Returns the result in one sentence."""
    failed, left = ([o.name for o in outcomes if o.state == state] for state in (FAILED, NOT_RUN))
    ended = [o for o in outcomes if o.state in (HELD, FAILED, NOT_RUN)]
    ran = len(ended) - len(left)
    if not ran:
        text = "Nothing could run here." if ended else "No step has ended."
    elif failed:
        text = f"{len(failed)} of {ran} steps that could run do not hold: {', '.join(failed)}."
    else:
        text = f"What could run holds: {ran} of {len(ended)} steps."
    return text + (f" Not run: {', '.join(left)}." if left else "")


def failures(outcomes: Sequence[Outcome]) -> List[str]:
    """Returns the cases that failed, the first ten of each step."""
    lines: List[str] = []
    for outcome in outcomes:
        found = outcome.figures.get("failures", [])
        if found:
            lines += ["", f"## {outcome.name}: {len(found)} of {outcome.figures['cases']} cases do not hold", ""]
            lines += [f"- {failure['case']}: {failure['problem']}" for failure in found[:10]]
            lines += [f"- and {len(found) - 10} more, in report.json"] * (len(found) > 10)
    return lines


def switches(outcomes: Sequence[Outcome]) -> List[str]:
    """Returns the table of kernels: each one's result, and how to switch it off."""
    lines = ["", "## Switching a kernel off", "", "| operator | kernel | result | set this before Python starts |"]
    lines += ["| --- | --- | --- | --- |"]
    for op, (kernel, remark) in KERNELS.items():
        states = {o.state for o in outcomes if o.figures.get("operator", "") == op}
        # The step aclnn, whose single outcome names all kernels.
        named = [failure.get("kernel") for o in outcomes for failure in o.figures.get("failures", [])]
        states |= {FAILED} if kernel in named else set()
        state = next((state for state in (FAILED, HELD) if state in states), NOT_RUN)
        lines.append(f"| {op} | {kernel} | {state}{remark and f'; {remark}'} | `{switch(op)}` |")
    lines += ["", "All at once: `MINDLORA_BACKEND=composed`. MindSpore's own operators then compute the same."]
    return lines


def rehearsed() -> List[str]:
    """Returns the table of steps that had passed without an NPU."""
    lines = [
        "",
        "## Before an NPU",
        "",
        "What had passed on MindSpore's own Ascend backend, on a stand-in for CANN:",
        "",
    ]
    lines += ["| step | what had passed |", "| --- | --- |"]
    return lines + [f"| {step} | {what} |" for step, what in REHEARSED.items()]


def cell(text: str) -> str:
    """Returns a text escaped for a table cell."""
    return text.replace("|", "\\|")
