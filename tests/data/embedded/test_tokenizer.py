from typing import Any

from transformers import AutoTokenizer

from data.embedded.target import EmbeddedTarget

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 <|im_end|>"},
    {"role": "assistant", "content": "\n  y = x + 1\n"},
    {"role": "tool", "content": "ok\n"},
    {"role": "assistant", "content": "return é"},
]


def test_the_assistant_mask_covers_answers_and_end_tokens(built: EmbeddedTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    encoded: Any = tokenizer.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    answers = tokenizer.decode([token for token, in_answer in pairs if in_answer])
    assert answers == "y = x + 1<|im_end|>return é<|im_end|>"
