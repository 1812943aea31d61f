"""Writes the tables of docs/what-runs.md from the tests that ran: which features ran, on which models, and where.

MINDLORA_SHOWN=shown.jsonl bash scripts/test.sh        tests write there what they show
python scripts/what_runs.py shown.jsonl                writes the tables
python scripts/what_runs.py shown.jsonl --check        exits with 1 if they claim more than was run
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
# Follows a place whose test exists but did not run.
ON_REQUEST = "°"


def shown(path):
    """Returns {(feature, model, trainer, place): whether a test of it passed} from the lines that tests wrote."""
    found = {}
    for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
        *key, _, passed = json.loads(line)
        found[tuple(key)] = found.get(tuple(key), False) or passed
    return found


def tables(found):
    """Returns the tables, one for each Trainer, as Markdown."""
    text = ""
    for trainer, title in TRAINERS.items():
        text += f"## {title}\n\n| | {' | '.join(MODELS.values())} |\n|{' --- |' * (len(MODELS) + 1)}\n"
        for feature, name in FEATURES.items():
            cells = [_cell(feature, model, trainer, found) for model in MODELS]
            if any(cells):
                text += f"| {name} | {' | '.join(cells)} |\n"
        text += "\n"
    return text


def _cell(feature, model, trainer, found):
    words = []
    for place, word in PLACES.items():
        passed = found.get((feature, model, trainer, place))
        if passed is not None:
            words.append(word if passed else word + ON_REQUEST)
    return ", ".join(words)


def claims(text):
    """Yields the claims of tables, cell by cell: (title of the table, row, column, words of the cell)."""
    title, columns = "", []
    for line in text.splitlines():
        if line.startswith("## "):
            title, columns = line[3:], []
        elif line.startswith("| "):
            row, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            columns = columns or cells
            for column, cell in zip(columns, cells):
                yield title, row, column, set(filter(None, cell.split(", ")))


def unshown(text, found):
    """Returns the claims of tables that no test showed, as lines."""
    ran = {claim[:3]: claim[3] for claim in claims(tables(found))}
    lines = []
    for *where, words in claims(text):
        for word in sorted(words - ran.get(tuple(where), set())):
            # A test that passed exists too.
            if word.rstrip(ON_REQUEST) == word or word.rstrip(ON_REQUEST) not in ran.get(tuple(where), set()):
                lines.append(f"{' / '.join(where)}: {word}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shown", help="the file that the tests wrote")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    head, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    text, tail = rest.split(END)
    found = shown(options.shown)
    if not options.check:
        DOCUMENT.write_text(f"{head}{BEGIN}{tables(found)}{END}{tail}", encoding="utf-8")
        return
    lines = unshown(text, found)
    if lines:
        print(*lines, sep="\n")
        sys.exit(
            "docs/what-runs.md says so, and no test that ran shows it: mend the test, or run scripts/what_runs.py."
        )
    print("All that docs/what-runs.md says was run.")


if __name__ == "__main__":
    main()
