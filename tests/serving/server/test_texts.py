"""/v1/embeddings, /v1/score and /v1/classify over an engine whose hidden states are known."""

import numpy as np
import openai
import pytest

from tests.support.scripted_engine import (
    BASE,
    HIDDEN,
    MODULES,
    SEQ_LENGTH,
    make_engine,
    started,
    write_adapter,
    write_pooling,
)
from tests.support.served_apps import ask, complete, error_of, live, make_app

LABELS = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with classifiers, one that says what it embeds with, and a base that does."""
    folder, base = tmp_path_factory.mktemp("adapters"), tmp_path_factory.mktemp("base")
    write_pooling(base, matryoshka_dimensions=[4])
    rng = np.random.default_rng(1)
    for name, labels in (("judge", LABELS), ("reward", 1), ("tagger", 2)):
        score = rng.normal(size=(labels, HIDDEN)).astype(np.float32)
        write_adapter(folder, name, score=score, of_tokens=name == "tagger")
    write_adapter(folder, "writer", "Arr, ")
    write_adapter(folder, "embedder", "Arr, ")
    write_pooling(folder / "embedder", "lasttoken", MODULES[:2])
    write_adapter(folder, "dense", "Arr, ")
    write_pooling(folder / "dense", modules=[*MODULES, ("3_Dense", "Dense")])
    with started(make_engine(str(folder), base_folder=str(base))) as made:
        yield made


@pytest.fixture(scope="module")
def app(engine):
    return make_app(engine, max_choices=8, max_prompt_tokens=50)


def states(engine, text, second=None):
    """The hidden states of a text's tokens."""
    tokens = text if isinstance(text, list) else engine.tokenizer.encode(text, second)
    return engine.runner.hidden[tokens].astype(np.float64)


def unit(vector):
    return vector / np.linalg.norm(vector)


def embed(app, texts, model=BASE, **fields):
    return ask(app, "/v1/embeddings", {"model": model, "input": texts, **fields})


def vectors(answer):
    assert answer.status_code == 200, answer.text
    return [entry["embedding"] for entry in answer.json()["data"]]


def test_an_embedding_is_the_mean_of_the_tokens_with_norm_1(app, engine):
    answer = embed(app, "hello cats")
    expected = unit(states(engine, "hello cats").mean(0))
    np.testing.assert_allclose(vectors(answer), [expected], atol=1e-6)
    content = answer.json()
    count = len(engine.tokenizer.encode("hello cats"))
    assert content["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert (content["object"], content["model"], content["data"][0]["object"]) == ("list", BASE, "embedding")


def test_texts_and_tokens_in_all_forms(app, engine):
    tokens = engine.tokenizer.encode("two dogs")
    several = vectors(embed(app, ["hello cats", "two dogs", "hello cats"]))
    assert several[0] == several[2]
    for form in ("two dogs", tokens, [tokens]):
        assert vectors(embed(app, form)) == [several[1]]
    bare = vectors(embed(app, "two dogs", add_special_tokens=False))
    np.testing.assert_allclose(bare, [unit(states(engine, tokens[1:]).mean(0))], atol=1e-6)


def test_an_adapter_s_own_folder_goes_before_the_base_s(app, engine):
    np.testing.assert_allclose(vectors(embed(app, "two dogs", "embedder")), [states(engine, "two dogs")[-1]], atol=1e-6)
    assert vectors(embed(app, "two dogs", "writer")) == vectors(embed(app, "two dogs"))


def test_dimensions_are_cut_before_the_norm(app, engine):
    expected = unit(states(engine, "two dogs").mean(0)[:4])
    np.testing.assert_allclose(vectors(embed(app, "two dogs", dimensions=4)), [expected], atol=1e-6)
    error = error_of(embed(app, "two dogs", dimensions=5))
    assert "dimensions is 5, but this model gives 4" in error["message"]


def test_the_openai_package_gets_numbers_from_base64(app, engine):
    with live(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked = client.embeddings.create(model=BASE, input=["hello cats"])
        plain = client.embeddings.create(model=BASE, input=["hello cats"], encoding_format="float")
    np.testing.assert_allclose(asked.data[0].embedding, plain.data[0].embedding, atol=1e-7)


@pytest.mark.parametrize("path", ["/v1/classify", "/classify"])
def test_classify_as_vllm_does(app, engine, path):
    answer = ask(app, path, {"model": "judge", "input": ["two cats", "hello"]}).json()
    head = engine.score_head("judge")
    for index, text in enumerate(("two cats", "hello")):
        scores = head.scores(states(engine, text)[-1])
        expected = np.exp(scores) / np.exp(scores).sum()
        entry = answer["data"][index]
        assert (entry["index"], entry["label"], entry["num_classes"]) == (index, f"LABEL_{scores.argmax()}", LABELS)
        np.testing.assert_allclose(entry["probs"], expected, atol=1e-6)
    assert answer["object"] == "list" and answer["id"].startswith("classify-") and answer["usage"]["prompt_tokens"] > 2
    raw = ask(app, path, {"model": "judge", "input": "hello", "use_activation": False}).json()
    np.testing.assert_allclose(raw["data"][0]["probs"], head.scores(states(engine, "hello")[-1]), atol=1e-6)


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_a_reward_model_scores_both_texts_as_one(app, engine, path):
    answer = ask(app, path, {"model": "reward", "text_1": "two cats", "text_2": ["hello", "no"]}).json()
    head = engine.score_head("reward")
    logits = [head.scores(states(engine, "two cats", second)[-1])[0] for second in ("hello", "no")]
    scores = [entry["score"] for entry in answer["data"]]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), atol=1e-6)
    assert answer["data"][1] == {"index": 1, "object": "score", "score": scores[1]}
    raw = {"model": "reward", "text_1": ["two cats"], "text_2": "hello", "use_activation": False}
    np.testing.assert_allclose(ask(app, path, raw).json()["data"][0]["score"], logits[0], atol=1e-6)


def test_any_other_model_scores_by_the_cosine_of_embeddings(app):
    texts = ["two cats", "hello dogs"], ["no", "hello dogs"]
    answer = ask(app, "/v1/score", {"model": BASE, "text_1": texts[0], "text_2": texts[1]}).json()
    first, second = (np.array(vectors(embed(app, each))) for each in texts)
    found = [entry["score"] for entry in answer["data"]]
    np.testing.assert_allclose(found, (first * second).sum(-1), atol=1e-6)
    assert found[1] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "path, body, param, words",
    [
        ("embeddings", {"input": "x", "model": "judge"}, "model", "judge is a classifier, which writes no text and"),
        ("embeddings", {"input": "x", "model": "dense"}, "model", "names the modules Transformer, Pooling, Normal"),
        ("embeddings", {"input": []}, "input", "input is not what it should be"),
        ("embeddings", {"input": "x", "normalize": False}, "normalize", "normalize is not supported"),
        ("embeddings", {"input": ["x"] * 9}, "input", "9 texts are given, but this server takes at most 8"),
        ("embeddings", {"input": [list(range(60))]}, "input", "has 60 tokens, but this server takes 50 at most"),
        ("embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format", "should be 'float' or 'base64'"),
        ("embeddings", {"input": [1, 10**6]}, None, "has token 1000000, but the model knows"),
        ("classify", {"input": "x"}, "model", "The base has no score head"),
        ("classify", {"input": "x", "model": "writer"}, "model", "writer has no score head, so it gives no labels"),
        ("classify", {"input": "x", "model": "tagger"}, "model", "tagger labels words, and /v1/classify whole texts"),
        ("score", {"text_1": "x", "text_2": "y", "model": "judge"}, "model", "judge is a classifier with 3 labels"),
        ("score", {"text_1": ["x", "y"], "text_2": "z"}, "text_1", "text_1 has 2 texts and text_2 1"),
        ("score", {"text_1": "x"}, "text_2", "text_2 is missing"),
        ("score", {"text_1": "x", "text_2": "y", "model": "juge"}, "model", "'judge'"),
    ],
)
def test_errors_name_the_field_and_no_path(app, engine, path, body, param, words):
    answer = ask(app, f"/v1/{path}", {"model": BASE, **body})
    error = error_of(answer)
    assert words in error["message"] and error["param"] == param
    assert answer.status_code == (404 if "juge" in body.values() else 400)
    assert engine.base_folder not in answer.text and engine.adapters.registry.folder not in answer.text


def test_a_classifier_writes_nothing(app):
    assert "judge is a classifier, which writes no text" in error_of(complete(app, model="judge"))["message"]


def test_a_base_that_names_no_pooling_is_refused(running):
    for path, body in (("embeddings", {"input": "x"}), ("score", {"text_1": "x", "text_2": "y"})):
        error = error_of(ask(make_app(running), f"/v1/{path}", {"model": BASE, **body}))
        assert error["code"] == "no_pooling" and f"{BASE} names no pooling: there is no modules" in error["message"]


def test_a_text_as_long_as_the_model_takes(engine):
    app = make_app(engine)
    assert embed(app, [[5] * SEQ_LENGTH]).status_code == 200
    error = error_of(embed(app, [[5] * (SEQ_LENGTH + 1)]))
    assert error["code"] == "context_length_exceeded"
