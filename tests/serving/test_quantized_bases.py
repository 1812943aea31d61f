"""An engine over a folder in a quantized form: its weights are the decoded ones, and it says so."""

import numpy as np

from mindlora.core.numerics.dtypes import BFLOAT16, from_float32, to_float32
from tests.support import tiny_serving
from tests.support.llama_checkpoints import FFN, HIDDEN, VOCAB
from tests.support.quantized_checkpoints import quantized_llama, save_quantized

SIZES = {"hidden_size": HIDDEN, "intermediate_size": FFN, "vocab_size": VOCAB, "num_layers": 2}


def test_an_engine_holds_the_decoded_weights_in_the_dtype_of_its_parameters_and_says_so(tmp_path):
    tensors, decoded = quantized_llama("gptq")
    folder = save_quantized(tmp_path / "base", "gptq", tensors)
    expected = decoded["model.layers.1.mlp.down_proj.weight"]
    for dtype, rounded in (("float32", expected), ("bfloat16", to_float32(from_float32(expected, BFLOAT16)))):
        engine = tiny_serving.engine(folder, tmp_path, tiny_serving.model(**SIZES, param_init_type=dtype))
        assert engine.base_notes == (f"14 weights are decoded from GPTQ in 4 bits to {dtype}.",)
        weights = {parameter.name: parameter for parameter in engine.runner.network.get_parameters()}
        held = weights["model.layers.1.feed_forward.w2.weight"].asnumpy().astype(np.float32)
        np.testing.assert_array_equal(held, rounded)
