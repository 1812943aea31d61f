"""What the programs of programs/ print: a word behind an @, then JSON."""

import json
from typing import Any, List


def printed(output: str, word: str) -> List[Any]:
    """Returns what a program printed behind ``@word``, line by line."""
    # MindSpore writes words without a new line on standard output.
    found = [line.partition(f"@{word} ")[2] for line in output.splitlines()]
    return [json.loads(text) for text in found if text]
