"""What rl.reward_funcs names: Python functions, built-in ones, and reward models behind an address."""

import contextlib
import json
import sys

import numpy as np
import pytest

from mindlora.core.errors import ConfigError, InstallationError, RewardError
from mindlora.training.rl.reward_functions import reward_of
from mindlora.training.rl.rewards import Rewards
from mindlora.training.rl.settings import rl_settings
from tests.support.scripted_engine import HIDDEN, make_engine, started, write_adapter
from tests.support.served_apps import live, make_app


def rate(entry, completions, folder="", **columns):
    """Returns the rewards of completions, of an entry as a YAML has it."""
    function = reward_of(entry, "rl.reward_funcs").load(str(folder))
    return list(function(prompts=["Q: "] * len(completions), completions=completions, **columns))


def test_exact_answer():
    assert rate("exact_answer", ["yes ", "Yes", " no\n"], answer=["yes", "yes", "no "]) == [1, 0, 1]
    assert rate({"type": "exact_answer", "column": "label"}, ["3", "4"], label=[3, 3]) == [1, 0]
    thoughts = [
        "<think>\nno?\n</think>\n\nyes",
        "no?\n</think>\n\nyes",
        "[THINK]no[/THINK]yes",
        "<think>\nyes",
        "yes</think>no",
    ]
    assert rate("exact_answer", thoughts, answer=["yes"] * 5) == [1, 1, 1, 0, 0]
    with pytest.raises(RewardError, match="exact_answer needs the column answer, .*Did you mean 'answers'"):
        rate("exact_answer", ["yes"], answers=["yes"])


@pytest.mark.parametrize(
    "completion, answer, reward",
    [
        ("so 3 + 4 = 7.", "7", 1),
        ("7 is it, not 8", "7", 0),
        ("#### 1,000", "he has 10 * 100 = 1000\n#### 1000", 1),
        ("$12.50", 12.5, 1),
        ("-3", "3", 0),
        ("5-3", "3", 1),
        ("12,34", "1234", 0),
        ("1,0000", "1,000", 0),
        (".5", "0.50", 1),
        ("none", "7", 0),
        ("1" * 5000, "1", 0),
    ],
)
def test_numeric_answer(completion, answer, reward):
    assert rate("numeric_answer", [completion], answer=[answer]) == [reward]


def test_numeric_answer_needs_a_number_in_the_data():
    with pytest.raises(RewardError, match="the column answer holds 'seven', in which there is no number"):
        rate("numeric_answer", ["7", "7"], answer=["7", "seven"])


def test_regex():
    assert rate({"type": "regex", "pattern": r"(?s)^<a>.*</a>\Z"}, ["<a>x\ny</a>", "<a>x</a> ", "a"]) == [1, 0, 0]


def test_length():
    at_most = {"type": "length", "max_words": 4}
    assert rate(at_most, ["", "a b c d", "a b c d e", "a " * 8, "a " * 90]) == [0, 0, -0.25, -1, -1]
    between = {"type": "length", "min_words": 2, "max_words": 2}
    assert rate(between, ["", "a", "a b", "a b c"]) == [-1, -0.5, 0, -0.5]
    assert rate({"type": "length", "max_words": 0}, ["", "a"]) == [0, -1]


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def test_json_schema(tmp_path):
    texts = [
        '{"age": 3}',
        ' {"age": 3}\n',
        '{"age": "3"}',
        "{}",
        '{"age": 3',
        '{"age": 3, "x": NaN}',
        "[" * 100_000,
        '<think>{}</think>{"age": 3}',
    ]
    expected = [1, 1, 0, 0, 0, 0, 0, 1]
    assert rate({"type": "json_schema", "schema": SCHEMA}, texts) == expected
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert rate({"type": "json_schema", "schema": "schema.json"}, texts, tmp_path) == expected


def test_a_schema_that_is_wrong(tmp_path):
    with pytest.raises(ConfigError, match="json_schema: schema is not a JSON schema: 'objekt' is not valid"):
        rate({"type": "json_schema", "schema": {"type": "objekt"}}, [])
    with pytest.raises(ConfigError, match="schema is missing.json, and .* cannot be read as JSON: .*Correct the path"):
        rate({"type": "json_schema", "schema": "missing.json"}, [], tmp_path)


def test_without_jsonschema(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(InstallationError, match=r"pip install mindlora\[rl\]"):
        rate({"type": "json_schema", "schema": SCHEMA}, [])


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """Returns a context manager: mindlora serve with adapters that have a score head, name -> labels; yields (url,
    engine). A text's score follows from the last of its tokens.
    """

    @contextlib.contextmanager
    def serving(labels, max_waiting=64):
        folder = tmp_path_factory.mktemp("adapters")
        for name, count in labels.items():
            score = np.random.default_rng(count).normal(size=(count, HIDDEN)).astype(np.float32)
            write_adapter(folder, name, score=score)
        with started(make_engine(str(folder), max_waiting=max_waiting)) as engine, live(make_app(engine)) as url:
            yield url, engine

    return serving


def test_the_only_reward_model_of_a_server(serve):
    # Without a completion, the prompt is what it reads.
    texts = ["", *(f"cats {count}" for count in range(69))]
    with serve({"helpful": 1}) as (url, engine):
        tokens = [engine.tokenizer.encode("Q: " + text)[-1] for text in texts]
        expected = engine.score_head("helpful").scores(engine.runner.hidden[tokens])[:, 0]
        for end in ("", "/", "/v1"):
            np.testing.assert_allclose(rate(url + end, texts), expected, rtol=1e-6)
    assert len(set(expected.tolist())) > 5


def test_a_server_of_several_models(serve):
    with serve({"helpful": 1, "kind": 2}) as (url, _):
        with pytest.raises(ConfigError, match="serves 2 adapters: helpful, kind. Name the reward model: {type: http:"):
            rate(url, ["a"])
        assert len(rate({"type": url, "model": "helpful"}, ["a"])) == 1
        with pytest.raises(RewardError, match="kind of http.* gives 2 scores to a text, but a reward model gives one"):
            rate({"type": url, "model": "kind"}, ["a"])
        with pytest.raises(RewardError, match="/v1/classify answered 404: .*other.*Check the server"):
            rate({"type": url, "model": "other"}, ["a"])


def test_a_server_whose_queue_is_full_is_asked_again(serve, tmp_path):
    with serve({"helpful": 1}, max_waiting=2) as (url, _):
        settings = rl_settings({"reward_funcs": {"type": url, "model": "helpful"}, "reward_timeout": 3})
        refusal = "(?s)helpful has not returned after 3 s.*classify answered 429: .*Asking again"
        with Rewards(settings, str(tmp_path)) as rewards, pytest.raises(RewardError, match=refusal):
            rewards.of(["Q: "] * 32, ["cats"] * 32, {})


def test_no_server():
    with pytest.raises(RewardError, match="http://127.0.0.1:9/v1/models does not answer: .*refused.*Start the server"):
        rate("http://127.0.0.1:9", ["a"])


def test_python_functions_of_files_with_one_name(tmp_path):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "beside.py").write_text("")
        (folder / "r.py").write_text(
            f"import beside\n\ndef f(prompts, completions, **c): return [{number}] * len(c['x'])"
        )
    assert rate("1/r.py:f", ["a"], tmp_path, x=["y"]) == [1]
    assert rate(f"{tmp_path}/2/r.py:f", ["a"], "elsewhere", x=["y"]) == [2]
    with pytest.raises(ConfigError, match="r.py has no function ff. Did you mean 'f'"):
        rate("1/r.py:ff", ["a"], tmp_path)
    with pytest.raises(ConfigError, match="names 3/r.py, but there is no file .*3/r.py. Correct the path"):
        rate("3/r.py:f", ["a"], tmp_path)


def test_a_reward_model_reads_prompts_that_are_texts():
    rate = reward_of({"type": "http://127.0.0.1:9", "model": "helpful"}, "rl.reward_funcs").load("")
    with pytest.raises(RewardError, match="helpful of http://127.0.0.1:9 reads .* prompts of this data are messages"):
        rate([[{"role": "user", "content": "Hello"}]], ["Hi"])
