"""adapter_config.json: invalid fields, and files that are not a configuration."""

import pytest

from mindlora.core.errors import AdapterFormatError
from mindlora.core.text import shown
from mindlora.files.adapters.dialects import peft_config
from mindlora.files.adapters.dialects.peft_tuners import TUNERS
from tests.support.peft_configs import PLAIN, read, written


def refused(path, message):
    with pytest.raises(AdapterFormatError) as error:
        peft_config.read(path)
    assert str(error.value) == path + message and len(str(error.value)) < 1000


# Fields ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, shown",
    [
        ("r", None, "None"),
        ("r", 0, "0"),
        ("r", -1, "-1"),
        ("r", 2.5, "2.5"),
        ("r", "8", "'8'"),
        ("r", True, "True"),
        ("r", [8], "[8]"),
        ("r", float("nan"), "nan"),
        ("r", float("inf"), "inf"),
    ],
)
def test_invalid_ranks(tmp_path, field, value, shown):
    message = f" is {shown}; it must be a whole number of at least 1."
    refused(written(tmp_path, {**PLAIN, field: value}), f": r{message}")
    refused(written(tmp_path, {**PLAIN, "rank_pattern": {"q_proj": value}}), f": rank_pattern['q_proj']{message}")


@pytest.mark.parametrize(
    "value, shown",
    [
        (None, "None"),
        (0, "0"),
        (-16, "-16"),
        ("16", "'16'"),
        (True, "True"),
        ({}, "{}"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (10**309, "1" + "0" * 199 + "..."),
    ],
)
def test_invalid_alphas(tmp_path, value, shown):
    message = f" is {shown}; it must be a number above 0."
    refused(written(tmp_path, {**PLAIN, "lora_alpha": value}), f": lora_alpha{message}")
    refused(written(tmp_path, {**PLAIN, "alpha_pattern": {"q_proj": value}}), f": alpha_pattern['q_proj']{message}")


@pytest.mark.parametrize("value", [1, 1.5, -0.1, "0.1", True, False, "", [], {}, float("nan")])
def test_invalid_dropouts(tmp_path, value):
    refused(
        written(tmp_path, {**PLAIN, "lora_dropout": value}),
        f": lora_dropout is {value!r}; it must be a number in [0, 1).",
    )


@pytest.mark.parametrize("value", ["false", "true", 0, 1, [], "", {}])
def test_flags_must_be_true_or_false(tmp_path, value):
    refused(written(tmp_path, {**PLAIN, "use_rslora": value}), f": use_rslora is {value!r}; it must be true or false.")
    refused(written(tmp_path, {**PLAIN, "use_dora": value}), f": use_dora is {value!r}; it must be true or false.")


@pytest.mark.parametrize(
    "field, value",
    [
        ("arrow_config", {"top_k": 2}),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("lora_bias", True),
        ("monteclora_config", {"a": 1}),
        ("use_bdlora", True),
        ("use_qalora", True),
        ("velora_config", {"a": 1}),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(tmp_path, field, value):
    refused(
        written(tmp_path, {**PLAIN, field: value}),
        f": {field} is {value!r}, which is not supported: {peft_config._UNSUPPORTED[field]}.",
    )


def test_an_adapter_that_acts_from_some_tokens_on_is_for_those_who_take_it(tmp_path):
    path = written(tmp_path, {**PLAIN, "alora_invocation_tokens": [7, 2]})
    refused(
        path,
        ": alora_invocation_tokens is [7, 2], so the adapter acts from these tokens on only (aLoRA), which has no "
        "merged form. Load it (load_lora), serve it (mindlora serve, generate, chat), or leave it in PEFT's form.",
    )
    assert peft_config.read(path, peft_config.Extras(invocation_tokens=True)).invocation_tokens == (7, 2)
    for value in (None, []):
        assert peft_config.read(written(tmp_path, {**PLAIN, "alora_invocation_tokens": value})).invocation_tokens == ()


def test_an_adapter_of_kasa_is_for_those_who_have_the_base(tmp_path):
    path = written(tmp_path, {**PLAIN, "kasa_config": {"beta": 0.1}})
    refused(
        path,
        ": kasa_config is {'beta': 0.1}, so the adapter belongs to a base without its smallest singular values. Load "
        "it (load_lora) or merge it, where they are computed from the base.",
    )
    extras = peft_config.Extras(initial_pairs=True)
    assert peft_config.read(path, extras).initializer == "kasa"
    both = written(tmp_path, {**PLAIN, "kasa_config": {"beta": 0.1}, "init_lora_weights": "pissa"})
    with pytest.raises(AdapterFormatError, match="init_lora_weights is 'pissa', so the adapter belongs to a base"):
        peft_config.read(both, extras)


@pytest.mark.parametrize("value", [7, "7", [7.0], [True], [-1], {"7": 2}])
def test_invalid_invocation_tokens(tmp_path, value):
    path = written(tmp_path, {**PLAIN, "alora_invocation_tokens": value})
    with pytest.raises(AdapterFormatError, match="it must be a list of token numbers"):
        peft_config.read(path, peft_config.Extras(invocation_tokens=True))


def test_every_such_field_is_tried_above():
    tried = test_what_changes_the_mathematics_is_refused_by_name.pytestmark[0].args[1]
    assert {field for field, _ in tried} == set(peft_config._UNSUPPORTED)


@pytest.mark.parametrize("value", [None, True, "some", 5])
def test_a_bias_that_peft_does_not_know(tmp_path, value):
    refused(
        written(tmp_path, {**PLAIN, "bias": value}), f": bias is {value!r}; it must be 'none', 'all' or 'lora_only'."
    )


def test_trained_rows_of_the_embedding_are_for_those_who_can_take_them(tmp_path):
    path = written(tmp_path, {**PLAIN, "trainable_token_indices": [5, 3]})
    refused(
        path,
        ": trainable_token_indices is [5, 3], so rows of the embedding were trained too, which only PEFT's form has a "
        "place for. Load it (load_lora), or merge it.",
    )
    assert peft_config.read(path, peft_config.Extras(token_rows=True)).token_rows == {"embed_tokens": [5, 3]}


@pytest.mark.parametrize("value", [[5, 5], [-1], ["5"], 5, {"embed_tokens": 5}, [1.5], [True]])
def test_invalid_token_numbers(tmp_path, value):
    path = written(tmp_path, {**PLAIN, "trainable_token_indices": value})
    with pytest.raises(AdapterFormatError) as error:
        peft_config.read(path, peft_config.Extras(token_rows=True))
    assert "it must be a list of different token numbers" in str(error.value)


@pytest.mark.parametrize("value", ["IA3", "lora", None, ["LORA"]])
def test_another_kind_of_adapter_is_refused(tmp_path, value):
    way_out = "PEFT merges most other kinds into their base (merge_and_unload)."
    known = ", ".join(map(repr, TUNERS))
    message = f": peft_type is {value!r}; it must be one of 'LORA', {known}. {way_out}"
    refused(written(tmp_path, {**PLAIN, "peft_type": value}), message)


CONVERT = "Save it with PEFT's path_initial_model_for_weight_conversion, which makes a plain LoRA of it."


@pytest.mark.parametrize("value", ["pissa", "PiSSA", "olora", "pissa_niter_16", "corda", "loftq", "lora_ga"])
def test_initializers_that_change_the_base_are_refused(tmp_path, value):
    way_out = "What it changed cannot be computed again. "
    path = written(tmp_path, {**PLAIN, "init_lora_weights": value})
    if value.lower() in ("pissa", "olora"):
        way_out = "Load it (load_lora) or merge it, where its initial pairs are computed from the base; or: "
        assert peft_config.read(path, peft_config.Extras(initial_pairs=True)).initializer == value.lower()
    message = f": init_lora_weights is {value!r}, so the adapter belongs to a base that this initializer changed. "
    refused(path, message + way_out + CONVERT)


def test_several_refusals_are_collected_for_those_who_only_look(tmp_path):
    fields = {"lora_bias": True, "init_lora_weights": "corda", "trainable_token_indices": [5]}
    extras = peft_config.Extras(refusals=[])
    assert peft_config.read(written(tmp_path, {**PLAIN, **fields}), extras).rank == 8
    assert [text.split(": ", 1)[1].split()[0] for text in extras.refusals] == [
        "lora_bias",
        "trainable_token_indices",
        "init_lora_weights",
    ]


@pytest.mark.parametrize(
    "field", ["target_modules", "target_parameters", "exclude_modules", "layers_pattern", "modules_to_save"]
)
@pytest.mark.parametrize("value", [5, True, ["q_proj", 5], [""], {"q_proj": 1}, [["q_proj"]]])
def test_invalid_module_names(tmp_path, field, value):
    refused(written(tmp_path, {**PLAIN, field: value}), f": {field} is {value!r}; it must be a list of module names.")


@pytest.mark.parametrize("value", ["0", [0, "1"], {"0": 1}, 1.5, True, [True]])
def test_invalid_layers(tmp_path, value):
    refused(
        written(tmp_path, {**PLAIN, "layers_to_transform": value}),
        f": layers_to_transform is {value!r}; it must be a layer number or a list of them.",
    )


@pytest.mark.parametrize(
    "expression, problem",
    [
        ("(", "missing ), unterminated subpattern at position"),
        ("*", "nothing to repeat"),
        ("[", "unterminated character"),
        # Valid by itself, but not inside the expression that PEFT puts around it.
        ("(?i)q_proj", "global flags not at the start of the expression"),
    ],
)
def test_invalid_expressions(tmp_path, expression, problem):
    for field in ("rank_pattern", "alpha_pattern"):
        path = written(tmp_path, {**PLAIN, field: {expression: 4}})
        with pytest.raises(AdapterFormatError) as error:
            peft_config.read(path)
        assert f"{path}: {field} holds {expression!r}, which is not a regular expression: " in str(error.value)
        assert problem in str(error.value)


@pytest.mark.parametrize("expression", ["(" * 5000 + ")" * 5000, "a{99999999999999999999}", "(", "(?P<a>x)(?P<a>y)"])
def test_expressions_that_cannot_be_compiled(tmp_path, expression):
    for field in ("target_modules", "exclude_modules"):
        with pytest.raises(AdapterFormatError, match=f"{field} holds .*, which is not a regular expression: "):
            read(tmp_path, **{field: expression})


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize("value", [["q_proj"], "q_proj", 5, True])
def test_patterns_must_be_tables(tmp_path, field, value):
    refused(
        written(tmp_path, {**PLAIN, field: value}),
        f": {field} is {value!r}; it must map regular expressions to numbers.",
    )


@pytest.mark.parametrize("value", [5, ["a"], True, {"a": 1}])
def test_the_base_model_must_be_a_text(tmp_path, value):
    refused(
        written(tmp_path, {**PLAIN, "base_model_name_or_path": value}),
        f": base_model_name_or_path is {value!r}; it must be a name or a path.",
    )


# Files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", " is not JSON: Expecting value: line 1 column 1 (char 0). Correct it, or copy the file again."),
        (
            b'{"r": 8, "lora_alpha": 16',
            " is not JSON: Expecting ',' delimiter: line 1 column 26 (char 25). Correct it, or copy the file again.",
        ),
        (b"[8, 16]", " holds a list instead of a JSON object. Check that it is the right file, and copy it again."),
        (b"8", " holds a int instead of a JSON object. Check that it is the right file, and copy it again."),
        (b"null", " holds a NoneType instead of a JSON object. Check that it is the right file, and copy it again."),
        (b'{"r": null}', ": r is None; it must be a whole number of at least 1."),
        (b'{"r": 8, "r": 4}', " has r twice, so it is unclear which one counts. Remove one."),
        (
            b'{"r": 8, "lora_alpha": 16, "rank_pattern": {"a": 1, "a": 2, "b": 1, "b": 1}}',
            " has a, b twice, so it is unclear which one counts. Remove one.",
        ),
        (b'{"r": 8, "lora_alpha": Infinity}', ": lora_alpha is inf; it must be a number above 0."),
        (b'{"r": 1e400, "lora_alpha": 1}', ": r is inf; it must be a whole number of at least 1."),
        (b'{"r": NaN, "lora_alpha": 1}', ": r is nan; it must be a whole number of at least 1."),
    ],
)
def test_files_that_are_not_a_configuration(tmp_path, text, message):
    refused(written(tmp_path, text), message)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"r": "é"}'.encode("latin-1"), "is not JSON: 'utf-8' codec can't decode byte 0xe9"),
        ('{"r": 8}'.encode("utf-16"), "is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"r": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b"[" * 100_000, "is not JSON: "),
        (b'{"r": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is not JSON: "),
        (b" " * 10_000_001, "is larger than 10 MB, so it is not a configuration."),
    ],
)
def test_files_that_are_not_json(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(AdapterFormatError) as error:
        peft_config.read(path)
    assert str(error.value).startswith(f"{path} {message}") and len(str(error.value)) < 1000


@pytest.mark.parametrize("depth", range(880, 1000, 3))
def test_the_deepest_nesting_that_json_reads_is_refused_too(tmp_path, depth):
    path = written(tmp_path, b'{"r": ' + b"[" * depth + b"]" * depth + b"}")
    with pytest.raises(AdapterFormatError) as error:
        peft_config.read(path)
    assert str(error.value).startswith(path) and len(str(error.value)) < 1000


def test_a_config_that_is_missing_or_not_a_file(tmp_path):
    path = tmp_path / "adapter_config.json"
    refused(str(path), " is missing: copy it into the folder, beside the weights.")
    no_file = " is not a file but a folder, a device, or a broken link. Copy the file itself there."
    path.mkdir()
    refused(str(path), no_file)
    path.rmdir()
    path.symlink_to(path)
    refused(str(path), no_file)


def test_a_value_nested_too_deeply_to_show_is_described():
    value = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "a deeply nested list"
    while value:
        value = value.pop()  # Freed piece by piece, since freeing it at once can need just as much of the stack.


def test_a_long_value_is_cut(tmp_path):
    refused(
        written(tmp_path, {**PLAIN, "r": "x" * 1_000_000}),
        f": r is '{'x' * 199}...; it must be a whole number of at least 1.",
    )
