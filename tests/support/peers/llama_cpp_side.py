"""llama.cpp, in a process of its own: reads one request from stdin as JSON, and writes the answers to stdout.

{"model": file, "adapter": file or null, "texts": [...], "prompts": [token ids, ...], "count": N, "vocabulary": V,
"letter": the id of a token that is a letter} becomes
{"texts": [greedy continuation, ...], "tokens": [ids of each text, ...],
"log_probabilities": [[of each token after this prompt], ...]}.
"""

import json
import os
import sys
import urllib.request

# What llama.cpp prints must not come between.
ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import xllamacpp  # noqa: E402


def server(model, adapter):
    """Returns a server that computes in float32 as far as the file does, with keys and values in float32."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 512
    params.n_parallel = 1
    params.warmup = False
    params.cache_prompt = False
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    return xllamacpp.Server(params)


def tokens(llama, text):
    content = json.dumps({"content": text, "add_special": True}).encode()
    request = urllib.request.Request(f"{llama.listening_address}/tokenize", content)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["tokens"]


def main():
    request = json.load(sys.stdin)
    llama = server(request["model"], request.get("adapter"))
    texts = []
    for text in request["texts"]:
        answer = llama.handle_completions(
            {"prompt": text, "max_tokens": request["count"], "temperature": 0, "cache_prompt": False}
        )
        texts.append(answer["choices"][0]["text"])
    rows = []
    for prompt in request["prompts"]:
        answer = llama.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": 1,
                # It withholds those of a token that is not a whole character; the bias changes none of them.
                "logit_bias": [[request["letter"], 1000]],
                "temperature": 0,
                "logprobs": request["vocabulary"],
                "cache_prompt": False,
            }
        )
        (first,) = answer["choices"][0]["logprobs"]["content"]
        row = [None] * request["vocabulary"]
        for each in first["top_logprobs"]:
            row[each["id"]] = each["logprob"]
        rows.append(row)
    found = [tokens(llama, text) for text in request["texts"]]
    print(json.dumps({"texts": texts, "tokens": found, "log_probabilities": rows}), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
