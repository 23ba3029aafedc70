import random

from data.conversations.near_duplicates import near_duplicates
from data.conversations.schemas import Conversation

WORDS = [f"word{i}" for i in range(2000)]


def conversation(question: str, answer: str = "yes", system: str = "Be brief.") -> Conversation:
    contents = {"system": system, "user": question, "assistant": answer}
    return Conversation(question[:9], tuple({"role": r, "content": c} for r, c in contents.items()))


def text(seed: int, num_words: int = 300) -> list[str]:
    return random.Random(seed).choices(WORDS, k=num_words)


def with_changes(words: list[str], every: int) -> list[str]:
    return [f"changed{i}" if i % every == 0 else word for i, word in enumerate(words)]


def test_near_duplicates_are_those_of_an_earlier_conversation():
    texts = [text(seed) for seed in range(300)]
    data = [conversation(" ".join(words)) for words in texts]
    data.append(conversation(" ".join(with_changes(texts[7], 150))))
    data.append(conversation("  " + " ".join(texts[9]).upper() + "!"))
    data.append(conversation(" ".join(with_changes(texts[11], 8))))
    found = near_duplicates(data, 0.8, with_answers=True, num_workers=2)
    assert found[300:].tolist() == [7, 9, -1]
    assert (found[:300] == -1).all()


def test_answers_count_only_if_they_are_kept_and_system_prompts_never_do():
    data = [
        conversation("what is it", " ".join(text(1)), " ".join(text(3))),
        conversation("what is it", " ".join(text(2)), " ".join(text(3))),
        conversation("another thing", " ".join(text(4)), " ".join(text(3))),
    ]
    assert near_duplicates(data, 0.8, with_answers=True).tolist() == [-1, -1, -1]
    assert near_duplicates(data, 0.8, with_answers=False).tolist() == [-1, 0, -1]


def test_short_texts_symbols_and_languages_without_spaces():
    questions = [
        "hi",
        "Hi!",
        "??",
        "++",
        "今日は天気がとても良いです",
        "今日は天気がとても悪いです。散歩に行く",
    ]
    found = near_duplicates([conversation(one) for one in questions], 0.8, with_answers=False)
    assert found.tolist() == [-1, 0, -1, -1, -1, -1]
