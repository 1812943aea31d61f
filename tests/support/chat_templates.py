"""Small chat templates after well-known models, tokenizers that have their tokens, and conversations."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from mindlora.data import tokenizers

# As Qwen's: a new line behind the token that ends a turn.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen2.5's and Hermes 2 Pro's, for tools: they stand in the system turn, and calls between two marks.
HERMES_TOOLS = """{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""
# As Llama 3's: bos once, contents trimmed, tools listed in the system turn, calls and answers as JSON.
LLAMA3 = """{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + (tools | tojson) + '<|eot_id|>' }}{% endif %}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif role == 'ipython' %}
        {{- (message.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- (message.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
# As Mistral's: no prompt for the assistant, the turns must alternate, and eos ends the assistant's alone.
MISTRAL = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Alternate') }}{% endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
# As Phi 3.5's: eos behind the conversation, and another token behind each turn.
PHI = CHATML.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
# As Qwen3's: what the assistant thought is left out of all turns but the last.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# THINKING with marks, which leave out the token that ends the turn.
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content if loop.last else message.content.split('</think>')[-1] }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen3.8's: each turn of the assistant begins with a block of thoughts, which are in a field of the message.
OPENING = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{{ '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
DIALOGUE = [
    {"role": "user", "content": "How many cats are there?"},
    {"role": "assistant", "content": "There are 2 cats, 温太医."},
    {"role": "user", "content": "And dogs?\n"},
    {"role": "assistant", "content": "None."},
]


def chat_tokenizer(template, **special):
    """Returns a byte-level tokenizer that joins new lines and spaces, as large ones do, and has a chat template."""
    texts = ["\n\n there are cats and dogs\n\n[INST] x [/INST] \n\n\n<think> x </think>  \n"] * 3
    tokenizer = tokenizers.fit_tokenizer(texts, 340)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, **special})
    tokenizer.chat_template = template
    # As Llama 3's: the range of a token leaves out its spaces, and bos is added where that is not switched off.
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])]
    )
    return tokenizer


def word_tokenizer(template, words):
    """Returns a tokenizer of the sentencepiece kind, as Llama 2's: a space belongs to the word after it."""
    specials = ["<unk>", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=alphabet, show_progress=False)
    tokenizer.train_from_iterator(words.split() * 2, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=template,
    )


def runs(encoded, tokenizer):
    """Returns the text of each run of learned tokens."""
    edges = np.flatnonzero(np.diff(encoded.learned.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(encoded.tokens[start:end]) for start, end in edges]
