"""Small tokenizers, and templates that resemble those of well-known models."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

CHATML_SPECIAL = ["<|im_start|>", "<|im_end|>"]
HEADERS_SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
TEXT = [
    "the quick brown fox jumps over the lazy dog\n\n",
    "system user assistant tool <think>\n\n</think>\n\n four six five three",
    "what is two and two\n\nit is four\n\nand three and three\n\nthat makes six\n",
] * 20

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

CHATML_MARKED = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{- message.content + '<|im_end|>' + '\\n' }}{% endgeneration %}
{%- else %}{{- message.content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Only the last turn keeps its thinking, and the generation prompt skips thinking on request.
THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""

# As GLM's: the next message's role ends a turn, and only turns after the last question keep their thinking.
ROLES = """\
{%- set last = namespace(question=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set last.question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' %}
{{- '<think>' + (message.reasoning_content or '' if loop.index0 > last.question else '') + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}{{- '<call>' + call.function.name + '</call>' }}{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
ROLE_TOKENS = ["<|user|>", "<|assistant|>", "<|tool|>"]

# As Kimi's: only calls keep their thinking, and an answer gets an empty thought.
NEVER_THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{{- '<think>' + (message.reasoning_content or '' if message.tool_calls else '') + '</think>' }}
{%- endif %}
{{- message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# As DeepSeek's: the prompt chooses whether the target thinks, and an answer is what follows its thought.
PROMPTED_THINKING = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{{- '</think>' + message.content.split('</think>')[-1] }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + ('<think>' if thinking is defined and thinking else '</think>') }}
{%- endif %}"""

HEADERS = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

INSTRUCTIONS = """\
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<s>[INST] ' + message.content + ' [/INST]' }}
{%- else %}{{- ' ' + message.content + ' </s>' }}{%- endif %}
{%- endfor %}"""

# As Mistral's: the last message has the system prompt, and an answered one has not.
SYSTEM_LAST = """\
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<s>[INST] ' + (system if loop.last else '') + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + ' </s>' }}{%- endif %}
{%- endfor %}"""

# No special token is next to the answers, so that tokens can cross their boundaries.
PLAIN = """\
{%- for message in messages %}
{{- message.role + '\\n' + message.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant\\n' }}{%- endif %}"""

STRICT = (
    "{%- for message in messages %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}{%- endfor %}" + CHATML
)


def byte_level_tokenizer(chat_template: str | None, eos_token: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with a few hundred merges, including newlines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*CHATML_SPECIAL, *HEADERS_SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token)
    fast.chat_template = chat_template
    return fast


def sentencepiece_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Train a sentencepiece-like BPE tokenizer with space marks, a leading mark and byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *in_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = chat_template
    return fast


def python_tokenizer(chat_template: str) -> ByT5Tokenizer:
    """Make a tokenizer with one token per byte and without character offsets."""
    tokenizer = ByT5Tokenizer(extra_ids=0, additional_special_tokens=CHATML_SPECIAL, eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    return tokenizer
