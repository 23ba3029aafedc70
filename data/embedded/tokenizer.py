"""The embedded target's tokenizer: byte-level BPE, and a ChatML template that marks the answers."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.embedded.corpus import ChatExample

PAD_TOKEN = "<|pad|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"

# The assistant's text is trimmed because a leading line break would fuse with the one after the role into a
# token of its own, and the generation prompt would no longer be a prefix of the whole.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
        {{- raise_exception('unknown role: ' + message['role']) -}}
    {%- endif -%}
    {{- '<|im_start|>' + message['role'] + '\\n' -}}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}
        {{- message['content'] | trim + '<|im_end|>' -}}
        {%- endgeneration -%}
    {%- else -%}
        {{- message['content'] + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(
    conversations: Sequence[ChatExample], vocab_size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with at most `vocab_size` entries, the special tokens and all 256 bytes among them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[PAD_TOKEN, START_TOKEN, END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Roles are part of what the template writes: each becomes one token.
    texts = (message[key] for c in conversations for message in c["messages"] for key in ("role", "content"))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=END_TOKEN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Writes what `AutoTokenizer.from_pretrained` reads, in transformers 4 and 5 alike."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    # transformers 5 writes a class name that 4, which other engines still use, does not know.
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
