"""The tables of all operators: one file for each, whose FORMS are tested by tests/ops/test_contract.py."""

from tests.ops.operators import (
    frozen_linear,
    integer_linear,
    lora_delta,
    lora_dropout,
    lora_linear,
    masked_attention,
    multi_lora_delta,
    multi_lora_linear,
    multi_lora_slot_write,
    nf4_linear,
    paged_attention,
    rms_norm,
    rotary_embedding,
    rounded_linear,
    routed_experts,
)

OPERATORS = (
    *(*frozen_linear.FORMS, *integer_linear.FORMS),
    *(*lora_delta.FORMS, *lora_dropout.FORMS, *lora_linear.FORMS, *masked_attention.FORMS, *multi_lora_delta.FORMS),
    *(*multi_lora_linear.FORMS, *multi_lora_slot_write.FORMS, *nf4_linear.FORMS, *paged_attention.FORMS),
    *(*rms_norm.FORMS, *rotary_embedding.FORMS, *rounded_linear.FORMS, *routed_experts.FORMS),
)
