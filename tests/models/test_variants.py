"""Variants: what follows from use_dora, use_vera and use_adalora, asked without a network."""

import ast

import pytest

from mindlora.core.errors import ConfigError
from mindlora.core.numerics.pair_shapes import CONVOLUTION, EMBEDDING, LAYOUTS, LINEAR
from mindlora.core.numerics.pair_shapes import EXPERTS as STACKED
from mindlora.models.lora_config import LoraConfig
from mindlora.models.variants.adalora import ADALORA
from mindlora.models.variants.dora import DORA
from mindlora.models.variants.miss import MISS
from mindlora.models.variants.registry import LORA, PARAMETERS, PARTS, SHARED_PARTS, STORED, VARIANTS
from mindlora.models.variants.variant import CONVOLUTIONS, CUT, EMBEDDINGS, EXPERTS, QUANTIZED, SHARDED
from mindlora.models.variants.vera import VERA
from tests.support.sources import modules

SHAPES = {LINEAR: (5, 7), EMBEDDING: (11, 3), CONVOLUTION: (6, 2, 3, 4), STACKED: (4, 5, 7)}
JOINED = ["model.layers.0.attention.w_qkv", "model.layers.0.attention.wo"]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_the_field_of_a_variant_asks_for_it(variant):
    assert LoraConfig(**{variant.field: True}).variant is variant
    assert LoraConfig().variant is LORA


def test_two_variants_are_refused():
    with pytest.raises(ConfigError, match="^use_adalora is True and use_vera is True, which AdaLoRA does not have"):
        LoraConfig(use_vera=True, use_adalora=True)


@pytest.mark.parametrize(
    "variant, shapes",
    [
        (LORA, {"A": (2, 7), "B": (5, 2)}),
        (DORA, {"A": (2, 7), "B": (5, 2), "magnitude": (5,)}),
        (VERA, {"lambda_d": (2,), "lambda_b": (5,)}),
        (MISS, {"block": (5, 2)}),
        (ADALORA, {"A": (2, 7), "B": (5, 2), "lambda": (2,)}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_parts_of_a_linear_cell(variant, shapes):
    assert variant.part_shapes(LINEAR, (5, 7), 2) == shapes
    assert variant.trained_parts(LoraConfig()) == tuple(shapes)
    assert set(shapes) <= set(PARAMETERS)


def test_the_pairs_of_other_cells():
    assert LORA.part_shapes(EMBEDDING, (11, 3), 2) == {"A": (2, 11), "B": (3, 2)}
    assert LORA.part_shapes(CONVOLUTION, (6, 2, 3, 4), 2, groups=2) == {"A": (2, 4, 3, 4), "B": (6, 1, 1, 1)}
    assert LORA.part_shapes(STACKED, (4, 5, 7), 2) == {"A": (4, 2, 7), "B": (4, 5, 2)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.cells)
def test_a_pair_leads_back_to_the_weight(layout):
    pair = layout.pair_shapes(SHAPES[layout], 2)
    rows, columns = SHAPES[layout][-2:]
    weight = (4 * columns, rows) if layout is STACKED else SHAPES[layout]
    assert layout.weight_shape(pair["A"], pair["B"]) == weight


def test_the_shared_projection_is_as_wide_as_the_widest_cell():
    assert VERA.shared_shapes([(5, 7), (3, 9)], 2) == {"shared A": (2, 9), "shared B": (5, 2)}
    assert not DORA.shared_shapes([(5, 7)], 2)


def test_freeze_lora_a_leaves_a_untrained():
    assert LORA.trained_parts(LoraConfig(freeze_lora_a=True)) == ("B",)
    assert DORA.trained_parts(LoraConfig(freeze_lora_a=True, use_dora=True)) == ("B", "magnitude")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("base", [EMBEDDINGS, CONVOLUTIONS, EXPERTS, SHARDED])
def test_what_a_variant_cannot_be_put_on_is_said_with_the_reason(variant, base):
    refusal = variant.refusal(LoraConfig(**{variant.field: True}), base)
    assert refusal.startswith(f"{variant.field} is not supported on {base}: {variant.unsupported_on[base]}. Leave")
    assert LORA.refusal(LoraConfig(), base) is None


@pytest.mark.parametrize(
    "fields, base, refused",
    [
        ({"freeze_lora_a": True}, EMBEDDINGS, "freeze_lora_a"),
        ({"lora_dropout": 0.1}, EXPERTS, "lora_dropout"),
        ({"lora_init": "pissa"}, EMBEDDINGS, "lora_init 'pissa'"),
        ({"lora_init": "orthogonal"}, CONVOLUTIONS, "lora_init 'orthogonal'"),
        ({"lora_init": "olora"}, QUANTIZED, "lora_init 'olora'"),
        ({"lora_init": "loftq", "quantize_base": "nf4"}, EXPERTS, "lora_init 'loftq'"),
        ({"lora_init": "pissa"}, CUT, "lora_init 'pissa'"),
        ({"lora_init": "pissa"}, SHARDED, None),
        ({"lora_init": "orthogonal"}, QUANTIZED, None),
        ({"lora_dropout": 0.1}, EMBEDDINGS, None),
    ],
)
def test_other_settings_that_a_base_does_not_support(fields, base, refused):
    refusal = LORA.refusal(LoraConfig(**fields), base)
    assert refusal is None if refused is None else refusal.startswith(f"{refused} is not supported on {base}: ")


def test_a_refusal_ends_with_the_ways_out():
    config = LoraConfig(use_dora=True)
    assert DORA.refusal(config, EMBEDDINGS).endswith("Leave use_dora out, or add the cell to exclude_modules.")
    assert DORA.refusal(config, SHARDED).endswith("Leave use_dora out, or train in data parallel (parallel_mode: 0).")
    assert LORA.refusal(LoraConfig(lora_init="pissa"), CUT).endswith("Leave lora_init out, or set model_parallel: 1.")
    found = LORA.refusal(LoraConfig(lora_init="pissa"), QUANTIZED)
    assert found.endswith("Leave lora_init out, or leave quantize_base out.")


def test_a_variant_that_cannot_be_split_is_refused_on_joined_cells():
    for variant in (LORA, *VARIANTS):
        variant.check_paths(JOINED[1:])
        if variant.cannot_join:
            with pytest.raises(ConfigError, match=f"^{variant.field} is True, and .*w_qkv do the work of several"):
                variant.check_paths(JOINED)
        else:
            variant.check_paths(JOINED)


def test_adalora_is_stored_as_plain_lora():
    assert ADALORA not in STORED and {DORA, VERA} <= set(STORED)


# Who may know a variant: itself, its cell, the feature that trains it, and tables of what other programs call it.
KNOWS_VARIANTS = ("models/variants/", "network/variants/", "network/pynative/", "training/adalora/")
TABLES = ("files/adapters/dialects/",)


def names_a_variant(path, node):
    """Returns whether a node of a module names a variant, or a part that only variants have."""
    parts = {part.name for variant in VARIANTS for part in variant.parts} | set(SHARED_PARTS)
    parts |= {part.parameter for part in PARTS.values()} | {variant.tensors for variant in VARIANTS if variant.tensors}
    if isinstance(node, ast.ImportFrom) and not path.startswith(TABLES):
        package, _, module = (node.module or "").rpartition(".")
        return package == "mindlora.models.variants" and module not in ("variant", "registry")
    return isinstance(node, ast.Constant) and node.value in parts


def test_no_other_module_names_a_variant():
    found = [
        f"{path}:{node.lineno}"
        for path, _, tree in modules()
        if not path.startswith(KNOWS_VARIANTS)
        for node in ast.walk(tree)
        if names_a_variant(path, node)
    ]
    assert not found, f"models/variants/ is to answer what is asked at {', '.join(found)}"


def test_no_module_on_files_of_adapters_counts_dimensions():
    found = [
        f"{path}:{node.lineno}"
        for path, _, tree in modules()
        if path.startswith("files/adapters/")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "ndim"
    ]
    assert not found, f"core/numerics/pair_shapes.py is to answer what is asked at {', '.join(found)}"
