"""Lists of paths in messages."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindlora.core.text import collapse_numbers, examples, listed, near_word, number, shown, suggestion
from mindlora.models.architectures import registry


@pytest.mark.parametrize(
    "paths, lines",
    [
        ([], []),
        (["lm_head"], ["lm_head"]),
        ([f"model.layers.{i}.attention.wq" for i in range(32)], ["model.layers.{0..31}.attention.wq"]),
        (["layers.4.wq"], ["layers.4.wq"]),
        (["layers.0.wq", "layers.0.wk", "layers.1.wq", "layers.1.wk"], ["layers.{0..1}.wq", "layers.{0..1}.wk"]),
        (["layers.5.wq", "layers.0.wq", "layers.2.wq"], ["layers.{0,2,5}.wq"]),
        (["a.0.b.3.c", "a.0.b.4.c", "a.0.b.5.c"], ["a.0.b.{3..5}.c"]),
        (["layers.9.wq", "layers.10.wq", "lm_head"], ["layers.{9..10}.wq", "lm_head"]),
        (["0", "1"], ["{0..1}"]),
        (["layers.0.wq A", "layers.0.wq B", "layers.1.wq A"], ["layers.{0..1}.wq A", "layers.0.wq B"]),
    ],
)
def test_paths_that_differ_in_a_number_are_combined(paths, lines):
    assert collapse_numbers(paths) == lines


@pytest.mark.parametrize(
    "paths, lines",
    [
        # Two numbers that vary, but not freely: one line would also claim (0, 1) and (1, 0).
        (["a.0.b.0", "a.1.b.1"], ["a.0.b.0", "a.1.b.1"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.{0..1}.b.{0..1}"]),
    ],
)
def test_a_combined_line_claims_no_path_too_many(paths, lines):
    assert collapse_numbers(paths) == lines


def _expand(line):
    """Returns all paths that a line of collapse_numbers stands for."""
    choices = []
    for part in line.split("{"):
        inside, closed, rest = part.partition("}")
        if not closed:
            choices.append([part])
        elif ".." in inside:
            first, last = map(int, inside.split(".."))
            choices.append([f"{i}{rest}" for i in range(first, last + 1)])
        else:
            choices.append([i + rest for i in inside.split(",")])
    return {"".join(choice) for choice in itertools.product(*choices)}


@given(
    st.sets(
        st.builds("layers.{}.experts.{}.{}".format, st.integers(0, 3), st.integers(0, 2), st.sampled_from(["wq", "wk"]))
    )
)
def test_combined_lines_mean_the_same_paths(paths):
    lines = collapse_numbers(sorted(paths))
    expanded = [path for line in lines for path in _expand(line)]
    assert sorted(expanded) == sorted(paths)


def test_lists_in_messages():
    paths = ["layers.0.wq", "layers.1.wq", "a", "b", "c", "d"]
    assert listed(paths) == "layers.{0..1}.wq, a, b, c, d"
    assert examples(paths) == "layers.{0..1}.wq, a, b, c and 1 more"
    assert examples(paths[:3]) == "layers.{0..1}.wq, a" and examples([]) == ""


def test_the_nearest_known_word():
    assert suggestion("pfet", ["slora", "peft"]) == " Did you mean 'peft'? Known: peft, slora."
    assert suggestion("xyz", ["slora", "peft"]) == " Known: peft, slora."


MODELS = [name for record in registry.ARCHITECTURES for name in record.model_types]
KEYS = ["lora_rank", "lora_alpha", "use_dora", "adapter_path", "data_parallel", "epochs", "batch_size", "adam", "AdamW"]


@pytest.mark.parametrize(
    "word, known, near",
    [
        ("Qwen3ForCausalML", MODELS, "Qwen3ForCausalLM"),
        ("LlamaForCasualLM", MODELS, "LlamaForCausalLM"),
        ("llamaforcausallm", MODELS, "LlamaForCausalLM"),
        ("DeepSeekV3ForCausalLM", MODELS, "DeepseekV3ForCausalLM"),
        ("qwen3moe", registry.hugging_face_types(), "qwen3_moe"),
        ("lora_rnak", KEYS, "lora_rank"),
        ("rank", KEYS, "lora_rank"),
        ("adapter_pth", KEYS, "adapter_path"),
        ("data_paralel", KEYS, "data_parallel"),
        ("epoch", KEYS, "epochs"),
        ("batchsize", KEYS, "batch_size"),
        ("adamw", KEYS, "AdamW"),
    ],
)
def test_a_misspelt_name_is_near(word, known, near):
    assert near_word(word, known) == near


@pytest.mark.parametrize(
    "word",
    [
        *("InternLMForCausalLM", "InternLM2ForCausalLM", "BaichuanForCausalLM", "MixtralForCausalLM", "PhiForCausalLM"),
        *("TelechatForCausalLM", "Glm4MoeForCausalLM", "DeepseekV2ForCausalLM", "GPT2LMHeadModel", "TelechatConfig"),
        *("T5ForConditionalGeneration", "ChatGLM3ForConditionalGeneration", "QWenConfig", "BertForTokenClassification"),
        *("CogVLM2Config", "Qwen3VLForConditionalGeneration"),
    ],
)
def test_another_model_is_not_near_because_its_name_ends_alike(word):
    assert near_word(word, MODELS) is None


@pytest.mark.parametrize("word", ["lora_init", "use_vera", "data_skip", "adapter_name", "bs"])
def test_another_key_is_not_near_because_it_begins_or_ends_alike(word):
    assert near_word(word, KEYS) is None


def test_a_value_in_a_message_is_short():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    assert shown("a") == "'a'" and len(shown("a" * 1000)) == 203 and shown(nested) == "a deeply nested list"


@pytest.mark.parametrize(
    "value, text",
    [(None, "-"), (3, "3"), (0.767123, "0.7671"), (179.44, "179.4"), (31872.6, "31873"), (-2e4 - 0.4, "-20000")]
    + [(1.5e-5, "1.5e-05"), (2.5e12 + 0.5, "2.5e+12"), (float("nan"), "nan"), (float("inf"), "inf")],
)
def test_a_number_is_short_and_without_a_power_where_it_needs_none(value, text):
    assert number(value) == text
