from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.capture.hf import HiddenStateCapture
from data.decode import TargetDecoder
from data.loader import pack_row
from data.store import CapturedSample
from data.target import TargetHead, TargetModules, TargetSpec, locate
from eagle31.acceptance import AcceptanceStats, replay
from eagle31.drafter import Drafter
from eagle31.frozen import FrozenParts
from eagle31.loss import greedy_hits
from eagle31.speculate import acceptance, decode_plainly, decode_speculatively, verify_sampled
from tests.eagle31.tiny import tiny_config

CPU = torch.device("cpu")
VOCAB = 7  # so small that an untrained drafter is right now and then
END = 6
AUX = (0, 2, 4)


def tiny_target() -> tuple[LlamaForCausalLM, TargetModules]:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.5,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return model, locate(model, TargetSpec("tiny"))


def drafter_for(modules: TargetModules, **changes: object) -> tuple[Drafter, FrozenParts]:
    torch.manual_seed(2)
    config = tiny_config(
        **{
            "vocab_size": VOCAB,
            "draft_vocab_size": 5,
            "aux_layer_ids": AUX,
            "hidden_size": 20,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 10,
            **changes,
        }
    )
    drafter = Drafter(config).requires_grad_(False)
    ids = torch.tensor([0, 1, 3, 4, 6]) if config.pruned else None
    embed = modules.embed_tokens.get_parameter("weight")
    return drafter, FrozenParts(embed, TargetHead(modules.final_norm, modules.lm_head), ids, None)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"num_hidden_layers": 2, "norm_before_residual": True},
        {"draft_vocab_size": VOCAB},
    ],
    ids=["eagle3.1", "eagle3", "two layers", "full vocabulary"],
)
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_text_is_the_targets_and_replay_equals_decoding(changes: dict, draft_tokens: int) -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules, **changes)
    capture = HiddenStateCapture(model, modules, AUX)
    decoded, replayed = [], AcceptanceStats(draft_tokens, 0, (0,) * draft_tokens)
    limits = {"max_new_tokens": 30, "eos_token_ids": [END]}
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(VOCAB - 1, (3 + seed,), generator=generator).tolist()
        own = decode_plainly(target, prompt, device=CPU, **limits)
        ours = decode_speculatively(target, drafter, frozen, prompt, draft_tokens=draft_tokens, **limits)
        assert ours.token_ids == own.token_ids
        assert len(ours.token_ids) == 30 or ours.token_ids[-1] == END
        decoded.append(ours)
        ids = torch.tensor([*prompt, *own.token_ids])
        mask = torch.arange(len(ids)) >= len(prompt)
        [(aux, last)] = capture.capture([ids])
        batch = pack_row([CapturedSample(ids, mask, aux, last)], len(ids))
        replayed += replay(*greedy_hits(drafter, frozen, batch, draft_tokens), draft_tokens)
    stats = acceptance(decoded, draft_tokens)
    assert stats == replayed
    # Some drafts are accepted, some rejected: agreement would mean nothing otherwise.
    assert 0 < stats.num_accepted < stats.num_drafts * draft_tokens
    assert sum(one.num_target_forwards for one in decoded) < sum(len(one.token_ids) for one in decoded)


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    q = torch.tensor([[0.1, 0.1, 0.4, 0.4]])
    counts: Counter[int] = Counter()
    num = 20000
    for _ in range(num):
        draft = int(torch.multinomial(q[0], 1, generator=generator))
        num_accepted, own = verify_sampled([draft], q, p, generator)
        counts[draft if num_accepted else own] += 1
    shares = torch.tensor([counts[i] / num for i in range(4)])
    # Five standard deviations of the largest share.
    torch.testing.assert_close(shares, p[0], rtol=0, atol=5 * (0.25 / num) ** 0.5)


def test_sampled_first_tokens_follow_the_target() -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules)
    generator = torch.Generator().manual_seed(3)
    prompt = [1, 2, 3]
    counts = torch.zeros(VOCAB)
    num = 1500
    for _ in range(num):
        ours = decode_speculatively(
            target,
            drafter,
            frozen,
            prompt,
            draft_tokens=2,
            max_new_tokens=2,
            eos_token_ids=[],
            temperature=1.5,
            generator=generator,
        )
        counts[ours.token_ids[1]] += 1
    target.start()
    first, _ = target.forward(torch.tensor(prompt))
    expected = torch.zeros(VOCAB)
    for token, share in enumerate((first[-1] / 1.5).softmax(-1)):
        target.rollback(len(prompt))
        logits, _ = target.forward(torch.tensor([token]))
        expected += share * (logits[-1] / 1.5).softmax(-1)
    torch.testing.assert_close(counts / num, expected, rtol=0, atol=5 * (0.25 / num) ** 0.5)
