"""take_score: the head of a classifier in an adapter, its task, and what its labels are called."""

import json

import numpy as np
import pytest

from mindlora.core.errors import AdapterFormatError, ShapeMismatchError
from mindlora.files.adapters.adapter import Adapter
from mindlora.serving.score_head import take_score
from tests.support.networks import normal
from tests.support.refusals import part, refused

HIDDEN, LABELS = 4, 3


def adapter(bias=False, **peft_fields):
    modules = {"score.weight": normal(LABELS, HIDDEN, seed=1)}
    if bias:
        modules["score.bias"] = normal(LABELS, seed=2)
    return Adapter({}, saved_modules=modules, peft_fields=peft_fields)


def test_scores_are_a_product_and_a_bias(tmp_path):
    made = adapter(bias=True)
    modules = dict(made.saved_modules)
    head = take_score(made, HIDDEN, str(tmp_path))
    hidden = normal(5, HIDDEN, seed=3)
    expected = hidden @ modules["score.weight"].T + modules["score.bias"]
    np.testing.assert_allclose(head.scores(hidden), expected, rtol=1e-6)
    assert made.saved_modules == {} and head.nbytes == 4 * (LABELS * HIDDEN + LABELS)
    assert take_score(Adapter({}), HIDDEN, "it") is None


@pytest.mark.parametrize(
    "bias, fields, of_tokens",
    [
        (False, {"task_type": "SEQ_CLS"}, False),
        (True, {"task_type": "TOKEN_CLS"}, True),
        (True, {"task_type": "SEQ_CLS"}, False),
        (False, {"task_type": "TOKEN_CLS"}, True),
        (True, {}, True),
        (False, {}, False),
    ],
)
def test_the_task_is_peft_s_or_that_of_transformers_head(tmp_path, bias, fields, of_tokens):
    assert take_score(adapter(bias, **fields), HIDDEN, str(tmp_path)).of_tokens == of_tokens


def test_labels_are_called_as_the_file_beside_the_adapter_says(tmp_path):
    assert take_score(adapter(), HIDDEN, str(tmp_path)).names == ("LABEL_0", "LABEL_1", "LABEL_2")
    (tmp_path / "labels.json").write_text(json.dumps(["no", "yes", "perhaps"]))
    assert take_score(adapter(), HIDDEN, str(tmp_path)).names == ("no", "yes", "perhaps")


@pytest.mark.parametrize(
    "content, found",
    [
        ("[", "is not JSON"),
        ('{"a": 1}', "must hold a JSON list of texts"),
        ('["a", 2, "c"]', "must hold a JSON list of texts"),
        ('["a", "b"]', "names 2 labels, but the head has 3 scores"),
        ('["a", "b", "a"]', "names 2 labels, but the head has 3 scores"),
    ],
)
def test_names_of_other_labels_are_refused(tmp_path, content, found):
    (tmp_path / "labels.json").write_text(content)
    refused(AdapterFormatError, part(found), take_score, adapter(), HIDDEN, str(tmp_path))


def test_a_head_of_another_width_is_refused(tmp_path):
    found = "score.weight, the head of a classifier, is [3, 4], but the model's width is 5"
    refused(ShapeMismatchError, part(found), take_score, adapter(), 5, str(tmp_path))
