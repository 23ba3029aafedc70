"""The embedded target's tokenizer: byte-level BPE and a ChatML template with generation markers."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data.embedded.corpus import ChatExample

PAD_TOKEN = "<|pad|>"
START_TOKEN = "<|im_start|>"
END_TOKEN = "<|im_end|>"

# The assistant's text is trimmed, because a leading line break would merge with the one after the role into
# one token, and the generation prompt would no longer be a prefix of the conversation.
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
    examples: Sequence[ChatExample], vocab_size: int, max_positions: int
) -> PreTrainedTokenizerFast:
    """Train byte-level BPE with at most `vocab_size` entries, including special tokens and all 256 bytes."""
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
    # The template writes roles too, and each should become one token.
    texts = (message[key] for e in examples for message in e["messages"] for key in ("role", "content"))
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
    """Save the tokenizer so that `AutoTokenizer` of transformers 4 and 5 can load it."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    # transformers 5 writes a class name that transformers 4, which some engines use, does not know.
    config = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n")
