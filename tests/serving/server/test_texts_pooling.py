"""read_pooling: what sentence-transformers' files of a model say, and what cannot be done here."""

import json

import numpy as np
import pytest

from mindlora.core.errors import ConfigError, RequestError
from mindlora.serving.server.texts import Pooling, read_pooling
from tests.support.networks import normal
from tests.support.refusals import part, refused

HIDDEN = normal(5, 8, seed=1)


def write(folder, pooling, kinds=("Transformer", "Pooling"), bert=None, model=None):
    entries = [{"path": f"{number}_{kind}" if number else "", "type": kind} for number, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config.json").write_text(json.dumps(model or {}))
    if bert is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps(bert))


@pytest.mark.parametrize(
    "pooling, expected",
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, HIDDEN[-1]),
        ({"pooling_mode_mean_tokens": True}, HIDDEN.mean(0)),
        ({"pooling_mode_cls_token": True}, HIDDEN[0]),
        ({"pooling_mode": "mean"}, HIDDEN.mean(0)),
        ({"pooling_mode": ["lasttoken"]}, HIDDEN[-1]),
    ],
)
def test_modes_by_both_of_their_spellings(tmp_path, pooling, expected):
    write(tmp_path, pooling)
    np.testing.assert_allclose(read_pooling(str(tmp_path)).embed(HIDDEN), expected, atol=1e-6)


def test_all_that_the_files_say(tmp_path):
    model = {"is_matryoshka": True}
    kinds = ("sentence_transformers.models.Transformer", "a.b.Pooling", "Normalize")
    (tmp_path / "1_a.b.Pooling").mkdir()
    write(tmp_path, {}, kinds, {"max_seq_length": 40, "do_lower_case": False}, model)
    (tmp_path / "1_a.b.Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    assert read_pooling(str(tmp_path)) == Pooling("first", True, (), True, 40)
    assert read_pooling(str(tmp_path / "1_Pooling")) is None


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "asks for the pooling max_tokens; here it can be one of"),
        ({"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}}, "cls_token, mean_token"),
        ({"pooling": {}}, "asks for the pooling nothing"),
        ({"kinds": ("Transformer", "Pooling", "Dense")}, "names the modules Transformer, Pooling, Dense"),
        ({"kinds": ("Transformer",)}, "names the modules Transformer; here they can be"),
        ({"bert": {"do_lower_case": True}}, "has do_lower_case, which is not done here"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path, changes, found):
    write(tmp_path, **{"pooling": {"pooling_mode": "mean"}, **changes})
    refused(ConfigError, part(found), read_pooling, str(tmp_path))


def test_a_damaged_list_of_modules_is_refused(tmp_path):
    (tmp_path / "modules.json").write_text('[{"path": ""}]')
    refused(ConfigError, part("is not a list of modules with type and path"), read_pooling, str(tmp_path))


@pytest.mark.parametrize("asked, pooling", [(None, {}), (4, {"dimensions": (4, 2)}), (8, {"any_dimension": True})])
def test_dimensions_that_a_model_allows(asked, pooling):
    Pooling("mean", **pooling).check_dimensions(asked, 8)


@pytest.mark.parametrize(
    "pooling, found",
    [
        ({}, "does not say that its embeddings can be cut"),
        ({"dimensions": (4, 2)}, "dimensions is 9, but this model gives 4, 2"),
        ({"any_dimension": True}, "dimensions is 9, but this model gives 1 to 8"),
    ],
)
def test_other_dimensions_are_refused(pooling, found):
    refused(RequestError, part(found), Pooling("mean", **pooling).check_dimensions, 9, 8)


def test_a_cut_embedding_has_norm_1():
    found = Pooling("last", True).embed(HIDDEN, 3)
    np.testing.assert_allclose(found, HIDDEN[-1, :3] / np.linalg.norm(HIDDEN[-1, :3]), atol=1e-6)
