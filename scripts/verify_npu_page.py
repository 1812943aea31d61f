"""The page of scripts/verify_npu.py: what holds, what does not, and how to switch each kernel off meanwhile."""

from typing import Any, Dict, List, Sequence

from verify_npu_run import FAILED, HELD, NOT_RUN, Outcome

# Operator -> its kernel in CANN, and the operators that call it too.
KERNELS = {
    "lora_delta": ("LoraDelta", ""),
    "lora_linear": ("LoraLinear", ""),
    "nf4_linear": ("Nf4Dequantize", ""),
    "multi_lora_delta": ("MultiLoraDelta", "multi_lora_linear uses it too"),
    "multi_lora_slot_write": ("MultiLoraSlotWrite", ""),
}

NO_NPU = " There is no NPU here, so this page says nothing about the kernels."


def switch(op: str) -> str:
    """Returns the setting that replaces an operator's kernel by MindSpore's own operators."""
    return f"MINDLORA_BACKEND_{op.upper()}=composed"


def page(head: Dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Returns the page in Markdown.

    Args:
        head (dict): What the result depends on: versions, device, options.
        outcomes (sequence of Outcome): One for each step, in order.
    """
    lines = ["# mindlora on this machine", ""]
    lines += [f"- {name}: {value}" for name, value in head.items()]
    lines += [
        "",
        verdict(outcomes) + (NO_NPU if head.get("NPUs") == "none" and head.get("device") == "Ascend" else ""),
        "",
        "## Steps",
        "",
        "| step | result | what was seen | seconds | log |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {o.name} | {o.state} | {cell(o.line)} | {o.seconds:g} | {o.log} |" for o in outcomes]
    return "\n".join([*lines, *failures(outcomes), *switches(outcomes), ""])


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Returns the result in one sentence."""
    failed, left = ([o.name for o in outcomes if o.state == state] for state in (FAILED, NOT_RUN))
    ran = len(outcomes) - len(left)
    if not ran:
        text = "Nothing could run here."
    elif failed:
        text = f"{len(failed)} of {ran} steps that could run do not hold: {', '.join(failed)}."
    else:
        text = f"What could run holds: {ran} of {len(outcomes)} steps."
    return text + (f" Not run: {', '.join(left)}." if left else "")


def failures(outcomes: Sequence[Outcome]) -> List[str]:
    """Returns the cases of operators that failed, the first ten of each step."""
    lines: List[str] = []
    for outcome in outcomes:
        found = outcome.figures.get("failures", [])
        if found:
            lines += ["", f"## {outcome.name}: {len(found)} of {outcome.figures['cases']} cases", ""]
            lines += [f"- {failure['case']}: {failure['problem']}" for failure in found[:10]]
            lines += [f"- and {len(found) - 10} more, in report.json"] * (len(found) > 10)
    return lines


def switches(outcomes: Sequence[Outcome]) -> List[str]:
    """Returns the table of the kernels: what was found of each, and what switches it off."""
    lines = ["", "## Switching a kernel off", "", "| operator | kernel | result | set this before Python starts |"]
    lines += ["| --- | --- | --- | --- |"]
    for op, (kernel, remark) in KERNELS.items():
        states = {o.state for o in outcomes if o.figures.get("operator", "") == op}
        state = next((state for state in (FAILED, HELD) if state in states), NOT_RUN)
        lines.append(f"| {op} | {kernel} | {state}{remark and f'; {remark}'} | `{switch(op)}` |")
    lines += ["", "All at once: `MINDLORA_BACKEND=composed`. MindSpore's own operators then compute the same."]
    return lines


def cell(text: str) -> str:
    """Returns a text that can stand in a table."""
    return text.replace("|", "\\|")
