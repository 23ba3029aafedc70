"""Sampling settings in words, and whether they leave the model's probabilities as they are."""

from dataclasses import replace

from data.sampling import Sampling

PLAIN = Sampling(max_new_tokens=8, stop_token_ids=(0,), temperature=0.6, seed=0)


def test_limits_of_the_sampled_tokens_are_named_and_known() -> None:
    assert (PLAIN.of_all_tokens, PLAIN.described) == (True, "temperature=0.6")
    limited = replace(PLAIN, top_k=20, top_p=0.95)
    assert (limited.of_all_tokens, limited.described) == (False, "temperature=0.6, top_k=20, top_p=0.95")
    assert not replace(PLAIN, repetition_penalty=1.1).of_all_tokens
