"""DoRA: the norm of each row of the weight trains apart from its direction (Liu et al., 2024)."""

from mindlora.models.variants.variant import CONVOLUTIONS, EMBEDDINGS, EXPERTS, SHARDED, Part, Variant


class DoRA(Variant):
    """A pair, and a magnitude for each row of the weight."""

    name = "DoRA"
    field = "use_dora"
    peft_flag = "use_dora"
    unsupported_on = {
        EMBEDDINGS: "its norms are those of the rows of a linear cell",
        CONVOLUTIONS: "its norms are those of the rows of a linear cell",
        EXPERTS: "it needs the norms of single experts' rows",
        SHARDED: "the norm of a row of W + scale B A needs all of the row",
    }
    parts = (Part("magnitude", "mindpet_delta_lora_magnitude", ".lora_magnitude_vector", size="out"),)
    row_norms = "magnitude"
    # The error of a 16-bit norm would exceed the change that training makes to it.
    pynative_dtype = "float32"
    tensors = "DoRA magnitudes"
    report = "yes, with a magnitude for each row"
    cannot_combine = "several magnitudes of one row have no defined sum"


DORA = DoRA()
