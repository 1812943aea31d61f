"""aLoRA (alora_invocation_tokens): its needs from the model of a YAML, and from the rows of the data."""

from typing import Any, Iterator, List, Mapping, Optional, Sequence

import numpy as np

from mindlora.core.text import shown
from mindlora.core.yaml_file import PET, value_at
from mindlora.run.checks.finding import Finding, error, warning
from mindlora.run.yaml_run import YamlRun

KEY = f"{PET}.alora_invocation_tokens"
# How many tokens before answers are compared: more would be the end of a prompt that all rows share.
_MOST = 8
Row = Mapping[str, np.ndarray]


def check_invocation(run: YamlRun) -> Iterator[Finding]:
    """Yields an error for each setting with which adapters cannot act from their invocation tokens on."""
    if not run.at(KEY):
        return
    if run.is_classifier:
        yield error(
            KEY,
            f"alora_invocation_tokens is set and the model is {run.head_class}, whose head is of all tokens.",
            "Remove it.",
        )
    if run.mode == "predict" and run.model_config.get("use_past"):
        yield error(
            "model.model_config.use_past",
            "alora_invocation_tokens is set and use_past is True: MindFormers then gives the network each new token "
            "alone, from which it cannot tell that the adapter acts.",
            "Set use_past: False, or use mindlora generate, chat or serve.",
        )


def check_invocation_in_rows(
    where: str, rows: Sequence[Row], model: Mapping[str, Any], ignored: int, key: str = KEY
) -> Iterator[Finding]:
    """Yields a finding if rows of the data lack the invocation tokens, or have no counted label behind them.

    ``key`` is the YAML's key for the tokens of ``model``'s pet_config.
    """
    invocation = value_at(model, "pet_config.alora_invocation_tokens")
    if not isinstance(invocation, (list, tuple)) or not invocation:
        return
    idle = [row for row in rows if not _acts(row, list(invocation), model["seq_length"], ignored)]
    if not idle:
        return
    found = (
        f"{where}: rows without the tokens {shown(list(invocation))} of pet_config.alora_invocation_tokens, or without "
        f"labels that count behind them: {len(idle)} of the first {len(rows)}"
    )
    common = _before_answers(rows, ignored)
    if common:
        way_out = f"Name {common}, the tokens that all answers there follow, or the last of these."
    else:
        way_out = "Name tokens that each row has before its answer."
    if len(idle) == len(rows):
        yield error(key, f"{found}. The adapter would learn nothing.", way_out)
    else:
        yield warning(key, f"{found}. The adapter learns nothing from these.", way_out)


def _acts(row: Row, invocation: List[int], length: int, ignored: int) -> bool:
    """Returns whether an adapter that acts from the last invocation on affects the loss of a row."""
    start = last_start(row["input_ids"][:length].tolist(), invocation)
    labels: Optional[np.ndarray] = row.get("labels")
    if start is None or labels is None:
        return start is not None
    # Each label except the first is predicted from the token before it.
    return bool((labels[start + 1 :] != ignored).any())


def _before_answers(rows: Sequence[Row], ignored: int) -> List[int]:
    """Returns the tokens, at most _MOST, before the last answer of every row; empty if they differ."""
    common: Optional[List[int]] = None
    for row in rows:
        counted = np.flatnonzero(row.get("labels", row["input_ids"][:0]) != ignored)
        if not len(counted):
            continue
        gaps = np.flatnonzero(np.diff(counted) > 1)
        first = counted[gaps[-1] + 1] if len(gaps) else counted[0]
        before = row["input_ids"][max(first - _MOST, 0) : first].tolist()
        common = before if common is None else _common_end(common, before)
    return common or []


def _common_end(first: List[int], second: List[int]) -> List[int]:
    length = 0
    while length < min(len(first), len(second)) and first[-1 - length] == second[-1 - length]:
        length += 1
    return first[len(first) - length :]


def last_start(tokens: List[int], invocation: List[int]) -> Optional[int]:
    """Returns the last place at which the invocation tokens begin, or None without any."""
    for start in range(len(tokens) - len(invocation), -1, -1):
        if tokens[start : start + len(invocation)] == invocation:
            return start
    return None
