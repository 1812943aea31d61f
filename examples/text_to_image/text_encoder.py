"""A tiny text encoder under the module names of CLIP's: words to features that the UNet attends to."""

import mindspore as ms
from mindspore import nn, ops


class SelfAttention(nn.Cell):
    """Attention of each word to all words, with one head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Dense(width, width), nn.Dense(width, width)
        self.v_proj, self.out_proj = nn.Dense(width, width), nn.Dense(width, width)
        self.softmax, self.scale = nn.Softmax(axis=-1), width**-0.5
        self.scores, self.mix = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul()

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        weights = self.softmax(self.scores(self.q_proj(x) * self.scale, self.k_proj(x)))
        return self.out_proj(self.mix(weights, self.v_proj(x)))


class MLP(nn.Cell):
    """Two linear cells around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Dense(width, 4 * width), nn.Dense(4 * width, width)
        self.gelu = nn.GELU(approximate=False)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        return self.fc2(self.gelu(self.fc1(x)))


class EncoderLayer(nn.Cell):
    """Attention and MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm((width,)), nn.LayerNorm((width,))
        self.self_attn, self.mlp = SelfAttention(width), MLP(width)

    def construct(self, x: ms.Tensor) -> ms.Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class TextEncoder(nn.Cell):
    """Embeds words and places, then one layer.

    Args:
        words (int): Size of the vocabulary.
        length (int): Number of words in a caption.
        width (int): Width of the features. Default: 32.

    Inputs:
        - **tokens** (Tensor) - int32 [n, length].

    Outputs:
        Tensor [n, length, width].
    """

    def __init__(self, words: int, length: int, width: int = 32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(words, width, embedding_table="normal")
        self.position_embedding = ms.Parameter(ms.Tensor(0.02 * ms.numpy.randn(length, width), ms.float32))
        self.layers = nn.CellList([EncoderLayer(width)])
        self.final_layer_norm = nn.LayerNorm((width,))

    def construct(self, tokens: ms.Tensor) -> ms.Tensor:
        return self.final_layer_norm(self.layers[0](self.token_embedding(tokens) + self.position_embedding))
