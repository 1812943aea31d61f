"""transformers on PyTorch, for scale.py: answers with one token. Only scale_peft.py and this file import PyTorch.

python scale_transformers.py BASE      prints when the base was loaded and when it was ready to compute
"""

import sys

import torch
import transformers


def main() -> None:
    """Loads a folder in the dtype of its config, and answers as mindlora generate does."""
    (base,) = sys.argv[1:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    # PyTorch compiles nothing here; scale.py expects these two lines.
    print("compiling ...\ncompiled", flush=True)
    tokens = tokenizer("w3 w4", return_tensors="pt").input_ids
    with torch.no_grad():
        answer = model.generate(tokens, max_new_tokens=1, do_sample=False)
    print(tokenizer.decode(answer[0]))


if __name__ == "__main__":
    main()
