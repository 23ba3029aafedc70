from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.batches.loader import pack_row
from data.capture.hf import HiddenStateCapture
from data.samples import CapturedSample
from data.target.cached_decoding import TargetDecoder
from data.target.head import TargetHead
from data.target.modules import TargetModules, locate
from data.target.spec import TargetSpec
from eagle31.decoding.acceptance import AcceptanceStats
from eagle31.decoding.replay import replay
from eagle31.decoding.speculative import (
    Decoded,
    acceptance,
    decode_plainly,
    decode_speculatively,
    verify_sampled,
)
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.training.teacher_forced import greedy_hits
from tests.eagle31.tiny import MLA, tiny_config

CPU = torch.device("cpu")
VOCAB = 7  # so small that an untrained drafter is right now and then
END = 6
AUX = (0, 1, 2)
LIMITS: dict = {"max_new_tokens": 30, "eos_token_ids": [END]}


def tiny_target() -> tuple[LlamaForCausalLM, TargetModules]:
    torch.manual_seed(22)  # its completions vary, and some end early
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=20,
        intermediate_size=32,
        num_hidden_layers=2,
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


@dataclass(frozen=True)
class Case:
    """A prompt, the target's completion of it, and the captured states of both."""

    prompt: list[int]
    plain: Decoded
    sample: CapturedSample


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    model, modules = tiny_target()
    target, capture = TargetDecoder(model, modules, AUX), HiddenStateCapture(model, modules, AUX)
    found = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(VOCAB - 1, (3 + seed,), generator=generator).tolist()
        plain = decode_plainly(target, prompt, device=CPU, **LIMITS)
        ids = torch.tensor([*prompt, *plain.token_ids])
        mask = torch.arange(len(ids)) >= len(prompt)
        [(aux, final)] = capture.capture([ids])
        found.append(Case(prompt, plain, CapturedSample(ids, mask, aux, final)))
    return found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"num_hidden_layers": 2, "norm_before_residual": True},
        {"draft_vocab_size": VOCAB},
        MLA | {"num_attention_heads": 4, "num_hidden_layers": 2},
    ],
    ids=["eagle3.1", "eagle3", "two layers", "full vocabulary", "mla"],
)
@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_completions_are_the_targets_and_replay_equals_decoding(
    cases: list[Case], changes: dict, draft_tokens: int
) -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules, **changes)
    decoded, replayed = [], AcceptanceStats(draft_tokens, 0, (0,) * draft_tokens)
    for case in cases:
        ours = decode_speculatively(target, drafter, frozen, case.prompt, draft_tokens=draft_tokens, **LIMITS)
        assert ours.token_ids == case.plain.token_ids
        assert len(ours.token_ids) == LIMITS["max_new_tokens"] or ours.token_ids[-1] == END
        decoded.append(ours)
        batch = pack_row([case.sample], len(case.sample.input_ids))
        replayed += replay(*greedy_hits(drafter, frozen, batch, draft_tokens), draft_tokens)
    stats = acceptance(decoded, draft_tokens)
    assert stats == replayed
    # Agreement means something only if some drafts are accepted and some rejected.
    assert 0 < stats.num_accepted < stats.num_drafts * draft_tokens
    assert sum(one.num_target_forwards for one in decoded) < sum(len(one.token_ids) for one in decoded)


def test_drafts_and_margins_are_kept() -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules)
    limits = {"max_new_tokens": 30, "eos_token_ids": [END]}
    prompt = [1, 2, 3, 4]
    plain = decode_plainly(target, prompt, device=CPU, **limits)
    ours = decode_speculatively(target, drafter, frozen, prompt, draft_tokens=3, **limits)
    assert len(ours.margins) == len(ours.bounds) == len(ours.token_ids)
    torch.testing.assert_close(torch.tensor(ours.bounds), torch.tensor(plain.bounds), rtol=1e-4, atol=0)
    assert [len(one) for one in ours.draft_bounds] == [len(one) for one in ours.draft_margins]
    torch.testing.assert_close(torch.tensor(ours.margins), torch.tensor(plain.margins), rtol=0, atol=1e-4)
    assert len(ours.drafts) == len(ours.draft_margins) == len(ours.accepted) > 2
    position = 1
    for draft, margins, num_accepted in zip(ours.drafts, ours.draft_margins, ours.accepted, strict=True):
        following = ours.token_ids[position : position + 3]
        assert len(draft) == len(margins) == 3
        assert min(margins) > 0
        assert draft[:num_accepted] == following[:num_accepted]
        assert draft[num_accepted] != following[num_accepted] if num_accepted < len(following) else True
        position += num_accepted + 1
    sampled = decode_speculatively(
        target,
        drafter,
        frozen,
        prompt,
        draft_tokens=3,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        **limits,
    )
    assert len(sampled.drafts) == len(sampled.accepted)
    assert sampled.draft_margins == [[]] * len(sampled.drafts)


def test_a_draft_margin_is_the_drafters() -> None:
    """Moving the second-best logit up by the margin makes a tie."""
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules, draft_vocab_size=VOCAB)
    arguments = (target, drafter, frozen, [1, 2, 3])
    options = {"draft_tokens": 1, "max_new_tokens": 2, "eos_token_ids": []}
    before = decode_speculatively(*arguments, **options)
    ((token,),), ((margin,),) = before.drafts, before.draft_margins

    def logits_biased(bias: float) -> list[list[int]]:
        head = drafter.lm_head
        drafter.lm_head = torch.nn.Linear(head.in_features, head.out_features)
        drafter.lm_head.weight = head.weight
        drafter.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB), requires_grad=False)
        drafter.lm_head.bias[token] = bias
        drafts = decode_speculatively(*arguments, **options).drafts
        drafter.lm_head = head
        return drafts

    assert logits_biased(-0.99 * margin) == before.drafts
    assert logits_biased(-1.01 * margin) != before.drafts


def test_rejection_sampling_keeps_the_targets_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])
    q = torch.tensor([[0.1, 0.1, 0.4, 0.4]])
    counts: Counter[int] = Counter()
    num = 3000
    drafts = torch.multinomial(q[0], num, replacement=True, generator=generator).tolist()
    for draft in drafts:
        num_accepted, next_token = verify_sampled([draft], q, p, generator)
        counts[draft if num_accepted else next_token] += 1
    assert counts[3] == 0
    chi_square = sum((counts[i] - num * float(p[0, i])) ** 2 / (num * float(p[0, i])) for i in range(3))
    assert chi_square < 27.6  # two degrees of freedom: one in a million


def test_rejection_sampling_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft with a grid of the uniform variable; distributions replace the draws from them."""
    generator = torch.Generator().manual_seed(0)
    drawn_from: list[torch.Tensor] = []
    monkeypatch.setattr("eagle31.decoding.speculative.draw", lambda probs, _: drawn_from.append(probs) or 0)
    grid = (torch.arange(500) + 0.5) / 500
    for _ in range(3):
        p, q = (torch.randn(n, 5, generator=generator).mul(2).softmax(-1) for n in (2, 1))
        emitted = torch.zeros(5)
        for uniform in grid:
            monkeypatch.setattr(torch, "rand", lambda *_, u=uniform, **__: u)
            for token in range(5):
                num_accepted, _ = verify_sampled([token], q, p, generator)
                first = torch.eye(5)[token] if num_accepted else drawn_from[-1]
                emitted += q[0, token] * first / len(grid)
                if num_accepted:
                    assert torch.equal(drawn_from[-1], p[1])
        torch.testing.assert_close(emitted, p[0], rtol=0, atol=1 / len(grid))


def test_sampled_completions_follow_the_target() -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules)
    drafter.lm_head.weight.mul_(10)  # far from uniform, so that the distributions differ
    generator = torch.Generator().manual_seed(3)
    temperature, num_accepted = 1.5, 0
    emitted, expected = [], []
    for start in range(6):
        prompt = [start, 2, 3]
        ours = decode_speculatively(
            target,
            drafter,
            frozen,
            prompt,
            draft_tokens=2,
            max_new_tokens=160,
            eos_token_ids=[],
            temperature=temperature,
            generator=generator,
        )
        num_accepted += sum(ours.accepted)
        logits = model(input_ids=torch.tensor([prompt + ours.token_ids])).logits[0]
        emitted.append(torch.tensor(ours.token_ids))
        expected.append((logits[len(prompt) - 1 : -1] / temperature).softmax(-1))
    tokens, probs = torch.cat(emitted), torch.cat(expected).double()  # [N], [N, V]
    assert num_accepted > 100
    # Each token is drawn from its row given its prefix, so its deviations from the mean are a martingale.
    hits = torch.nn.functional.one_hot(tokens, VOCAB)
    deviations = (hits - probs).sum(0) / (probs * (1 - probs)).sum(0).sqrt()
    assert deviations.abs().max() < 4.5
    surprise = -probs.log()
    entropy = (probs * surprise).sum(1)
    excess = surprise[torch.arange(len(tokens)), tokens] - entropy
    variance = (probs * (surprise - entropy[:, None]) ** 2).sum(1)
    assert abs(excess.sum() / variance.sum().sqrt()) < 4.5
