"""Makes the tables of docs/what-runs.md from the tests that ran: which features were seen at work, on what, and where.

MINDLORA_SHOWN=shown.jsonl bash scripts/test.sh        tests write there what they show
python scripts/what_runs.py shown.jsonl                writes the tables
python scripts/what_runs.py shown.jsonl --check        exits with 1 if they say more than was run, or less
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.what_runs import FEATURES, MODELS, PLACES, TRAINERS  # noqa: E402

DOCUMENT = ROOT / "docs" / "what-runs.md"
BEGIN, END = "<!-- Written by scripts/what_runs.py. -->\n", "<!-- End. -->\n"
ON_REQUEST = "°"


def read(path):
    """Returns the cells of which a test passed, and those of which a test was there, as sets of tuples."""
    lines = [json.loads(line) for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines()]
    passed = {tuple(line[:4]) for line in lines if line[5]}
    return passed, {tuple(line[:4]) for line in lines}


def tables(passed, there):
    """Returns the tables, one for each Trainer, as Markdown."""
    text = ""
    for trainer, title in TRAINERS.items():
        text += f"## {title}\n\n| | {' | '.join(MODELS.values())} |\n|{' --- |' * (len(MODELS) + 1)}\n"
        for feature, name in FEATURES.items():
            cells = [_cell(feature, model, trainer, passed, there) for model in MODELS]
            if any(cells):
                text += f"| {name} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def _cell(feature, model, trainer, passed, there):
    words = []
    for place, word in PLACES.items():
        key = (feature, model, trainer, place)
        if key in passed:
            words.append(word)
        elif key in there:
            words.append(word + ON_REQUEST)
    return ", ".join(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shown", help="the file that the tests wrote")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    made = f"{head}{BEGIN}{tables(*read(options.shown))}{END}{tail}"
    if not options.check:
        DOCUMENT.write_text(made, encoding="utf-8")
    elif made != text:
        before, now = text.splitlines(), made.splitlines()
        print("docs/what-runs.md says:", *[line for line in before if line not in now], sep="\n")
        print("The tests that ran show:", *[line for line in now if line not in before], sep="\n")
        sys.exit("docs/what-runs.md is not what ran: run scripts/what_runs.py, or mend the test that did not pass.")


if __name__ == "__main__":
    main()
