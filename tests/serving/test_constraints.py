"""Constraints: what is generated under one meets it, whatever the logits are; what cannot be met is refused by name."""

import importlib.metadata
import json
import re

import numpy as np
import pytest

from mindlora.core.errors import RequestError
from mindlora.serving.constraints import LONGEST, LONGEST_GBNF, Constraint, ConstraintCompiler
from mindlora.serving.request import Sampling
from mindlora.serving.sampling import Sampler, sample_batch
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.generated_schemas import answer, schemas

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return ConstraintCompiler(tokenizer)


def compiled(compiler, kind, value):
    return compiler.compile(Constraint(kind, value, "the_field"))


def test_answers_are_json_that_the_schema_allows(compiler, tokenizer):
    for seed, schema in enumerate(schemas(60, seed=1)):
        text, ended = answer(compiled(compiler, "json", schema), tokenizer, seed)
        assert ended, (schema, text)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.2}, {"repetition_penalty": 1.5}])
def test_constraints_go_with_every_way_of_sampling(compiler, tokenizer, sampling):
    text, ended = answer(compiled(compiler, "regex", "[0-9]{3}-[a-c]+x"), tokenizer, 3, **sampling)
    assert ended and re.fullmatch("[0-9]{3}-[a-c]+x", text)


@pytest.mark.parametrize("grammar", ['start: "yes" | "no" " "+ "cats"', 'root ::= "yes" | "no" " "+ "cats"'])
def test_grammars_are_lark_or_gbnf(compiler, tokenizer, grammar):
    texts = {answer(compiled(compiler, "grammar", grammar), tokenizer, seed)[0] for seed in range(12)}
    assert "yes" in texts and all(re.fullmatch("yes|no +cats", text) for text in texts)


def test_a_choice_is_one_of_its_texts(compiler, tokenizer):
    texts = ['q"x', "\\n", "\n", "é"]
    assert {answer(compiled(compiler, "choice", texts), tokenizer, seed)[0] for seed in range(40)} == set(texts)


@pytest.mark.parametrize("name", ["<|im_end|>", "</s>", "<tool_call>"])
@pytest.mark.parametrize("kind", ["choice", "json", "regex", "grammar"])
def test_the_name_of_a_special_token_is_text(kind, name):
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens(["<tool_call>"])
    text = f"a{name}é"
    values = {
        "choice": [text, "q"],
        "json": {"enum": [text, "q"]},
        "regex": f"q|a{re.escape(name)}[é]",
        "grammar": f'start: "{text}" | "q"',
    }
    compiled_once = compiled(ConstraintCompiler(tokenizer), kind, values[kind])
    answers = [answer(compiled_once, tokenizer, seed) for seed in range(12)]
    assert all(ended for _, ended in answers)
    assert {said.strip('"') for said, _ in answers} == {text, "q"}


def test_an_answer_does_not_end_at_a_token_of_its_grammar_before_it_is_complete(compiler, tokenizer):
    (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    zeros = np.zeros(len(tokenizer), np.float32)
    masked = compiled(compiler, "grammar", 'start: "a" <|im_end|>').matcher(frozenset({end})).mask(zeros, [a])
    assert np.flatnonzero(masked == 0).tolist() == [end]
    early = compiled(compiler, "grammar", 'start: "a" <|im_end|> "b" | "a" "b"').matcher(frozenset({end}))
    assert tokenizer.decode(np.flatnonzero(early.mask(zeros, [a]) == 0)) == "b"
    with pytest.raises(RequestError, match="the_field has a token that ends answers in the middle of one"):
        compiled(compiler, "grammar", 'start: "a" <|im_end|> "b"').matcher(frozenset({end})).mask(zeros, [a])


def test_white_space_ends(compiler, tokenizer):
    version = importlib.metadata.version("llguidance")
    if tuple(map(int, version.split(".")[:2])) < (1, 9):
        pytest.skip(f"llguidance {version} bounds each run of white space alone, not how many there are")
    grammar = compiled(compiler, "json", {"type": "array", "items": {"type": "null"}})
    newline = tokenizer.encode("\n", add_special_tokens=False)
    space = tokenizer.encode(" ", add_special_tokens=False)
    matcher = grammar.matcher(frozenset())
    begin = tokenizer.encode("[", add_special_tokens=False)
    zeros = np.zeros(len(tokenizer), np.float32)
    assert matcher.mask(zeros, begin)[newline + space].tolist() == [0.0, 0.0]
    assert matcher.mask(zeros, begin + space)[newline + space].tolist() == [-np.inf, -np.inf]
    assert matcher.mask(zeros, begin + newline + space * 40)[newline + space].tolist() == [-np.inf, -np.inf]


def test_a_matcher_follows_tokens_that_were_taken_back(compiler, tokenizer):
    grammar = compiled(compiler, "regex", "ab|cd")
    a, b, c, d = tokenizer.encode("abcd", add_special_tokens=False)
    matcher = grammar.matcher(frozenset({7}))
    zeros = np.zeros(len(tokenizer), np.float32)
    allowed = lambda generated: np.flatnonzero(matcher.mask(zeros, generated) == 0).tolist()  # noqa: E731
    assert allowed([]) == sorted([a, c])
    assert allowed([a]) == [b] and allowed([c]) == [d]
    assert allowed([c, d]) == sorted([7, tokenizer.eos_token_id]) and allowed([a, b]) and allowed([]) == sorted([a, c])


def test_the_models_further_tokens_are_never_allowed(compiler, tokenizer):
    grammar = compiled(compiler, "json", {})
    masked = grammar.matcher(frozenset({2, 10**6})).mask(np.zeros(len(tokenizer) + 40, np.float32), [])
    assert masked.dtype == np.float32 and np.all(masked[len(tokenizer) :] == -np.inf) and masked.max() == 0


def test_rows_without_a_constraint_are_as_before_and_logprobs_are_the_networks(compiler, tokenizer):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, len(tokenizer))).astype(np.float32)
    kept = logits.copy()
    grammar = compiled(compiler, "choice", ["yes"])
    free, bound = (Sampler(Sampling(seed=4, logprobs=2, grammar=given), [1]) for given in (None, grammar))
    alone = Sampler(Sampling(seed=4, logprobs=2), [1]).sample(logits[0], [])
    both = [run[0] for run in sample_batch([free, bound], logits, [[], []], [(), ()])]
    assert both[0] == alone and np.array_equal(logits, kept)
    assert tokenizer.decode([both[1].token]) == "y"
    exact = logits[1] - np.log(np.exp(logits[1].astype(np.float64)).sum())
    assert abs(both[1].logprob - exact[both[1].token]) < 1e-5 and both[1].top[0][0] == int(exact.argmax())


@pytest.mark.parametrize(
    "kind, value, words",
    [
        ("json", {"type": "integer", "minimum": 3, "maximum": 1}, "minimum"),
        ("json", {"enum": []}, "empty"),
        ("json", {"$ref": "#"}, "no answer can meet it"),
        ("json", {"$ref": "http://localhost/x"}, "not present"),
        ("json", {"not": {"type": "string"}}, '"not"'),
        ("json", {"x-guidance": {"lenient": True}, "uniqueItems": True, "type": "array"}, "uniqueItems"),
        ("json", {"type": "foo"}, "foo"),
        ("json", '{"type": ', "EOF"),
        ("json", "[" * 5000, "recursion"),
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("grammar", "nonsense", "::="),
        ("grammar", 'start: start "a"', "no answer can meet it"),
        ("grammar", "root ::= " + '"a" ' * LONGEST_GBNF, "limit in GBNF"),
        ("regex", "a" * (LONGEST + 1), "limit"),
    ],
)
def test_what_cannot_be_met_is_refused_with_the_reason(compiler, kind, value, words):
    with pytest.raises(RequestError, match=f"^the_field cannot be used: .*{re.escape(words)}"):
        compiled(compiler, kind, value)


def test_long_chains_of_references_do_no_harm(compiler):
    names = [f"r{number}" for number in range(5000)]
    rules = [f"{name}: {following}" for name, following in zip(names, names[1:])]
    compiled(compiler, "grammar", "\n".join(["start: r0", *rules, 'r4999: "a"']))


def test_compilation_ends_in_time(compiler):
    many = {"enum": [f"value {number}" for number in range(6000)]}
    with pytest.raises(RequestError, match="the_field cannot be used: it takes more than 0 seconds to compile"):
        compiler.compile(Constraint("json", many, "the_field"), seconds=0.0)


def test_a_constraint_does_not_go_with_ignore_eos(compiler):
    with pytest.raises(RequestError, match="ignore_eos"):
        Sampler(Sampling(grammar=compiled(compiler, "json", {}), ignore_eos=True), [1])
