"""What the steps of scripts/verify_npu.py measured that mindlora otherwise estimates: its choices on such an NPU."""

import re
from typing import Any, Dict, List, Optional, Sequence

from verify_npu_run import FAILED, NOT_RUN, Outcome

# mindlora/ops/measured.py reads what is returned here from report.json.
_TITLE = re.compile(r"^forward, .* (\d+) tokens$")
ONE_PASS, TWO_STEPS = "lora_linear (ascend)", "lora_delta (ascend)"


def choices(outcomes: Sequence[Outcome], device: str) -> Optional[Dict[str, Any]]:
    """Returns the choices, or None if no operator was compared on an NPU.

    "composed": {operator: why its kernel must not be taken}; "one_pass_tokens": the most tokens for which lora_linear
    is faster than MatMul and lora_delta, or None if that was not measured.
    """
    compared = [outcome for outcome in outcomes if outcome.figures.get("operator") and outcome.state != NOT_RUN]
    if device != "Ascend" or not compared:
        return None
    wrong: Dict[str, List[str]] = {}
    for outcome in compared:
        if outcome.state == FAILED:
            wrong.setdefault(outcome.figures["operator"], []).append(outcome.figures["dtype"])
    tables = [table for outcome in outcomes if outcome.name == "bench" for table in outcome.figures.get("tables", [])]
    return {
        "composed": {op: f"the kernel does not hold in {', '.join(dtypes)}" for op, dtypes in wrong.items()},
        "one_pass_tokens": one_pass_tokens(tables),
    }


def one_pass_tokens(tables: Sequence[Dict[str, Any]]) -> Optional[int]:
    """Returns the last number of tokens up to which lora_linear is faster in every table of bench.py ops."""
    faster: Dict[int, bool] = {}
    for table in tables:
        title, seconds = _TITLE.match(table["title"]), table["seconds"]
        if title and ONE_PASS in seconds:
            tokens = int(title[1])
            first, second = (seconds[side]["wall"]["median"] for side in (ONE_PASS, TWO_STEPS))
            faster[tokens] = faster.get(tokens, True) and first < second
    if not faster:
        return None
    most = 0
    for tokens in sorted(faster):
        if not faster[tokens]:
            break
        most = tokens
    return most


def section(chosen: Optional[Dict[str, Any]]) -> List[str]:
    """Returns the section of the page."""
    if chosen is None:
        return []
    lines = [f"- {op}: MindSpore's own operators, because {why}" for op, why in chosen["composed"].items()]
    if chosen["one_pass_tokens"] is not None:
        lines.append(f"- lora_linear up to {chosen['one_pass_tokens']} tokens, and MatMul with lora_delta beyond")
    lines = lines or ["- every kernel that was compared holds, and nothing was timed: as mindlora chooses by itself"]
    advice = "`mindlora doctor --adopt report.json` makes them mindlora's, here or on another machine with such NPUs."
    return ["", "## Measured choices", "", *lines, "", advice]
