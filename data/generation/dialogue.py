"""A conversation whose assistant turns the target writes again."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.conversations.prompts import render_prompt
from data.conversations.schemas import Conversation
from data.conversations.template import TemplateRefused
from data.generation.turns import parsed_turn, same_calls


@dataclass(frozen=True)
class AnsweredTurn:
    """An assistant turn that the target has written."""

    turn: int  # 0 for the first of the conversation
    index: int  # of the conversation in its block
    prompt: Sequence[int]
    ids: Sequence[int]


class Dialogue:
    """The prompts of a conversation's assistant turns, each with the target's earlier completions.

    It ends after the last turn; where a prompt leaves no room for two tokens; where the template refuses;
    after an empty completion; and where recorded messages do not fit what the target wrote: the results of
    tool calls that it did not make, or no results of calls that it made.

    Args:
        max_tokens: the limit for prompt and completion together.
    """

    def __init__(
        self,
        conversation: Conversation,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any],
        max_tokens: int,
    ) -> None:
        self.conversation = conversation
        self.refusal: tuple[str, str] | None = None  # (id, reason) if the template refuses
        self.ended_at_tools = False  # whether recorded tool results did not fit
        self.turn = 0  # of the next prompt
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._max_tokens = max_tokens
        self._position = 0
        self._history: list[dict[str, Any]] = []
        self._prompt: Sequence[int] = ()

    def next_prompt(self) -> Sequence[int] | None:
        """Return the token ids up to the next assistant turn, or None at the end."""
        messages = self.conversation.messages
        while self._position < len(messages) and messages[self._position]["role"] != "assistant":
            self._history.append(dict(messages[self._position]))
            self._position += 1
        if self._position >= len(messages):
            return None
        try:
            prompt = render_prompt(
                self._tokenizer,
                self._history,
                self.conversation.tools,
                self._template_kwargs,
                self.conversation.template,
            )
        except TemplateRefused as refused:
            self.refusal = self.conversation.id, refused.remedy
            self._end()
            return None
        if len(prompt) + 2 > self._max_tokens:
            self._end()
            return None
        self._prompt = array("i", prompt)  # a tenth of a list's memory
        return self._prompt

    @property
    def num_turns_left(self) -> int:
        """The number of assistant turns that are not answered yet, if none ends the conversation."""
        left = self.conversation.messages[self._position :]
        return sum(message["role"] == "assistant" for message in left)

    def answered(self, index: int, ids: Sequence[int]) -> AnsweredTurn:
        """Continue as `add_answer` does, and return the turn that the completion answers."""
        turn = AnsweredTurn(self.turn, index, self._prompt, ids)
        self.add_answer(ids)
        return turn

    def add_answer(self, ids: Sequence[int]) -> None:
        """Continue after the target's completion of the latest prompt."""
        self.turn += 1
        if not ids:
            self._end()
            return
        messages = self.conversation.messages
        recorded = messages[self._position]
        self._position += 1
        if all(message["role"] != "assistant" for message in messages[self._position :]):
            self._end()  # nothing reads this turn
            return
        turn = parsed_turn(
            self._tokenizer,
            self._history,
            self.conversation,
            self._template_kwargs,
            self._prompt,
            ids,
        )
        has_results = messages[self._position]["role"] == "tool"
        if not (same_calls(turn, recorded) if has_results else not turn.get("tool_calls")):
            self.ended_at_tools = True
            self._end()
            return
        self._history.append(turn)

    def _end(self) -> None:
        self._position = len(self.conversation.messages)
