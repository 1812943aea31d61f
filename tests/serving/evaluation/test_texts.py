"""Perplexity and bits per byte: numpy on the whole logits, windows and rows of every kind."""

import math

import numpy as np
import pytest

from mindlora.core.errors import DataError
from mindlora.data.mindrecord import write_mindrecord
from mindlora.serving.evaluation.texts import (
    ScoredText,
    draw_samples,
    measure_forgetting,
    measure_texts,
    passages_of_rows,
    passages_of_texts,
    read_documents,
    windows,
)
from mindlora.serving.request import Sampling
from tests.support.tiny_serving import SEQ_LENGTH, tokenizer

WORDS = "The cats, 2 of them, eat and sleep; there are dogs as well. "


@pytest.mark.parametrize("length, overlap", [(1, 1), (4, 1), (4, 3), (4, 4), (7, 2)])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 23])
def test_each_token_but_the_first_is_scored_once_with_the_overlap_before_it(count, length, overlap):
    scored = []
    for passage in windows(list(range(count)), length, overlap):
        assert len(passage.tokens) <= length + 1
        assert passage.tokens == list(range(passage.tokens[0], passage.tokens[0] + len(passage.tokens)))
        assert passage.first == (1 if not scored else overlap)
        scored += passage.tokens[passage.first :]
    assert scored == list(range(1, count))


def test_texts_are_measured_in_windows_as_numpy_does(evaluated):
    texts = [WORDS * 12, WORDS, "Dogs."]
    passages = passages_of_texts(texts, tokenizer(), SEQ_LENGTH, 20)
    assert len(passages) > 5
    perplexity, bits = measure_texts(evaluated.engine, passages, evaluated.models, "a.txt", 0)
    for model in evaluated.models:
        nats = count = 0
        for text in texts:
            tokens = [tokenizer().bos_token_id or tokenizer().eos_token_id]
            tokens += tokenizer().encode(text, add_special_tokens=False)
            for passage in windows(tokens, SEQ_LENGTH, 20):
                table = evaluated.logprobs(passage.tokens[:-1], model)
                places = range(passage.first, len(passage.tokens))
                nats -= sum(table[place - 1, passage.tokens[place]] for place in places)
                count += len(places)
        size = sum(len(text.encode("utf-8")) for text in texts)
        assert perplexity.values[model or "base"].value == pytest.approx(math.exp(nats / count), rel=1e-4)
        assert bits.values[model or "base"].value == pytest.approx(nats / size / math.log(2), rel=1e-4)
    assert perplexity.examples == len(passages) and (perplexity.name, bits.name) == ("perplexity", "bits per byte")


def rows(*examples, **columns):
    """Returns rows of the tokens of examples, each given as tokens and those of them that have a label."""
    made = []
    for tokens, labeled in examples:
        labels = [token if place in labeled else -100 for place, token in enumerate(tokens)]
        arrays = {"input_ids": np.array(tokens, np.int32), "labels": np.array(labels, np.int32)}
        made.append({**arrays, **{name: np.array([value], np.int32) for name, value in columns.items()}})
    return made


def test_rows_count_the_tokens_that_have_a_label(evaluated, tmp_path):
    path = str(tmp_path / "rows.mindrecord")
    examples = [([5, 9, 7, 8, 0, 0], {2, 3}), ([5, 6, 7, 0, 0, 0], {0, 1, 2}), ([5, 6, 7, 8, 9, 10], {1, 4})]
    write_mindrecord(rows(*examples), path)
    passages = passages_of_rows(path, tokenizer(), SEQ_LENGTH)
    perplexity = measure_texts(evaluated.engine, passages, evaluated.models, "rows", 0)[0]
    for model in evaluated.models:
        nats = [
            -evaluated.logprobs(tokens[:place], model)[-1, tokens[place]]
            for tokens, labeled in examples
            for place in labeled - {0}
        ]
        assert perplexity.values[model or "base"].value == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)


def test_examples_of_a_packed_row_are_apart(tmp_path):
    path = str(tmp_path / "packed.mindrecord")
    write_mindrecord(rows(([1, 6, 7, 1, 8, 9, 0, 0], {1, 2, 5}), ([1, 6, 7, 7, 7, 7, 7, 7], {3}), boundary=1), path)
    found = passages_of_rows(path, tokenizer(), 7)
    assert [(one.passage.tokens, one.passage.first, one.counts.tolist()) for one in found] == [
        ([1, 6, 7], 1, [True, True]),
        ([1, 8, 9], 2, [True]),
        ([1, 6, 7, 7], 3, [True]),
    ]


def test_what_cannot_be_measured_is_refused(tmp_path):
    path = str(tmp_path / "rows.mindrecord")
    write_mindrecord(rows(([5, 6, 7, 8], {2})), path)
    with pytest.raises(DataError, match="rows of 4 tokens, and the engine predicts 2 at once. Set --seq-length 3"):
        passages_of_rows(path, tokenizer(), 2)
    shifted, nothing = str(tmp_path / "shifted.mindrecord"), str(tmp_path / "nothing.mindrecord")
    write_mindrecord([{"input_ids": np.arange(4, dtype=np.int32), "labels": np.arange(1, 5, dtype=np.int32)}], shifted)
    write_mindrecord(rows(([5, 6, 7, 8], {0})), nothing)
    for other, words in ((shifted, "labels are not the tokens of their places"), (nothing, "no row with a label")):
        with pytest.raises(DataError, match=words):
            passages_of_rows(other, tokenizer(), 8)
    with pytest.raises(DataError, match="cannot be read as a MindRecord"):
        passages_of_rows(str(tmp_path / "absent.mindrecord"), tokenizer(), 8)


def test_texts_are_read_from_plain_files_and_from_rows(tmp_path):
    (tmp_path / "a.txt").write_text("One.\n***\n  \n***\nTwo.\n")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "One."}\n{"text": 2}\n')
    (tmp_path / "empty.txt").write_text(" \n")
    assert read_documents(str(tmp_path / "a.txt")) == ["One.\n***\n  \n***\nTwo.\n"]
    assert read_documents(str(tmp_path / "a.txt"), "***") == ["One.\n", "\nTwo.\n"]
    assert read_documents(str(tmp_path / "a.jsonl")) == ["One.", "Two."]
    for name, words in (("b.jsonl", "line 2 has no text"), ("empty.txt", "holds no text")):
        with pytest.raises(DataError, match=words):
            read_documents(str(tmp_path / name))


def test_a_window_has_its_share_of_the_bytes():
    passages = passages_of_texts(["ä" * 50], tokenizer(), 16, 8)
    assert sum(one.bytes for one in passages) == pytest.approx(100)
    assert all(isinstance(one, ScoredText) and one.bytes > 0 for one in passages)


def test_samples_are_those_of_the_base_and_of_the_seed(evaluated):
    first, again, other = (draw_samples(evaluated.engine, 3, 12, seed) for seed in (0, 0, 5))
    assert first == again != other
    assert len({tuple(sample.tokens) for sample in first}) == 3
    start = first[0].tokens[:1]
    for number, sample in enumerate(first):
        request = evaluated.engine.submit(start, Sampling(max_tokens=12, seed=number))
        request.text()
        assert sample.tokens == request.request.tokens and sample.first == 1


def test_the_divergence_is_that_of_all_probabilities(evaluated):
    found = measure_forgetting(evaluated.engine, 60, 20, evaluated.models, 0)
    assert found.values["base"].value == 0 and found.examples == 60
    samples = draw_samples(evaluated.engine, 60, 20, 0)
    for model in evaluated.models[1:]:
        ratios, exact = [], []
        for sample in samples:
            base, tuned = (evaluated.logprobs(sample.tokens[:-1], name) for name in (None, model))
            places = np.arange(len(sample.tokens) - 1)
            ratios += (base - tuned)[places, sample.tokens[1:]].tolist()
            exact += (np.exp(base) * (base - tuned)).sum(-1).tolist()
        value = found.values[model]
        assert value.value == pytest.approx(np.mean(ratios), abs=1e-4)
        # Of the tokens that came, rather than of all that could have come: within four standard errors.
        noise = np.std(np.array(ratios) - exact) / len(exact) ** 0.5
        assert abs(value.value - np.mean(exact)) < 4 * noise
        assert value.low < np.mean(exact) < value.high
    assert found.values["first"].value > found.values["second"].value > 0
