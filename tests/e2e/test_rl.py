"""The example of docs/rl.md on stories260K: the share of words with an s rises. The adapter then teaches another."""

import json
import re
import shlex
import shutil

import pytest
import yaml

from mindlora.training.report.history import read_history
from tests.support import stories260k
from tests.support.runs import ROOT, python, succeeded
from tests.support.what_runs import shows

NAMES = ("Lily", "Tom", "Sara", "Ben", "Mia", "Sam", "Tim", "Amy")


def block(kind, begins="", name="rl.md"):
    """The first block of a page of one kind, and that begins so."""
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return re.search(rf"^```{kind}\n({begins}.*?)^```", page, re.M | re.S)[1]


@pytest.fixture(scope="module")
def output(library, tmp_path_factory):
    """The output folder of the run of the page, which is shorter here."""
    folder = tmp_path_factory.mktemp("rl")
    stories260k.write_folder(folder / "model", kept=2)
    (folder / "rewards.py").write_text(block("python"), encoding="utf-8")
    row = json.loads(block("json"))
    rows = [{"prompt": row["prompt"].replace("Lily", name)} for name in NAMES]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run(block("", "mindlora configs ").replace("epochs 10", "epochs 6"), folder)
    return folder / "output"


def run(commands, folder):
    for command in commands.splitlines():
        words = shlex.split(command)
        assert words[0] == "mindlora"
        succeeded(python(["-m", "mindlora.cli", *words[1:]], folder))


@shows("rl", "llama")
def test_the_reward_rises(output):
    rewards = read_history(str(output)).series("reward")[1]
    assert len(rewards) == 6 and rewards[-1] > rewards[0] + 0.2


def test_the_report_shows_curves_and_answers_with_their_rewards(output):
    page = (output / "report.html").read_text(encoding="utf-8")
    for title in ("Reward of the answers", "Largest difference between sampler and trainer", "Share of answers that"):
        assert title in page
    assert re.search(r"\(reward [\d.]+\)", page)


@shows("rl", "llama")
def test_a_student_learns_from_the_adapter(output, tmp_path):
    for name in ("model", "prompts.jsonl"):
        (tmp_path / name).symlink_to(output.parent / name)
    shutil.copytree(output / "lora_checkpoint" / "best", tmp_path / "teacher")
    run(block("", "mindlora configs ", "distillation.md"), tmp_path)
    found = read_history(str(tmp_path / "output")).series("teacher/kl")[1]
    assert len(found) and (found > 0).all()


def test_answers_under_a_schema_match_it_and_agree_with_the_trainer(output):
    pytest.importorskip("llguidance")
    pytest.importorskip("jsonschema")
    folder = output.parent
    schema = {"type": "object", "properties": {"who": {"enum": ["Lily", "Tom"]}}, "required": ["who"]}
    schema["additionalProperties"] = False
    (folder / "schema.json").write_text(json.dumps(schema), encoding="utf-8")
    config = yaml.safe_load((folder / "run.yaml").read_text(encoding="utf-8"))
    config["runner_config"]["epochs"] = 2
    config["runner_wrapper"]["rl"].update(
        reward_funcs={"type": "json_schema", "schema": "schema.json"},
        structured_outputs={"json": "schema.json"},
        max_disagreement=1e-4,
    )
    (folder / "schema.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = ["-m", "mindlora.cli", "rl", "schema.yaml", "--output_dir", str(folder / "schema")]
    succeeded(python(command, folder))
    history = read_history(str(folder / "schema"))
    # Each answer that ends matches: white space may fill one up to its limit.
    rewards = history.series("reward")[1]
    assert rewards.tolist() == (1 - history.series("completions/clipped_ratio")[1]).tolist()
    assert len(rewards) == 2 and rewards.min() > 0.5
    assert 0 < history.series("agreement/max")[1].max() < 1e-4
