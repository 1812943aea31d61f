"""The cells of plain LoRA: linear cells, embeddings, convolutions, routed experts."""
