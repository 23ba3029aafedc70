from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from data.batches.rows import pack_row
from data.capture.hf import HiddenStateCapture
from data.samples import CapturedSample
from data.target.cached_decoding import TargetDecoder
from data.target.head import TargetHead
from data.target.modules import TargetModules, locate
from eagle31.decoding.replay import replayed_drafts
from eagle31.decoding.speculative import decode_speculatively
from eagle31.model.config import DSparkShape
from eagle31.model.drafter import Drafter
from eagle31.model.frozen import FrozenParts
from eagle31.model.kinds import new_drafter
from eagle31.training.teacher_forced import by_draft_length, greedy_hits
from tests.eagle31.tiny import DSPARK, MLA, tiny_config

VOCAB = 7  # so small that an untrained drafter is right now and then
END = 6
AUX = (0, 1, 2)
LIMITS: dict = {"max_new_tokens": 30, "eos_token_ids": [END]}


def tiny_target() -> tuple[LlamaForCausalLM, TargetModules]:
    torch.manual_seed(50)  # its completions vary, and some end early
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
    return model, locate(model)


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
    drafter = new_drafter(config).requires_grad_(False)
    ids = torch.tensor([0, 1, 3, 4, 6]) if config.pruned else None
    embed = modules.embed_tokens.get_parameter("weight")
    return drafter, FrozenParts(embed, TargetHead(modules.final_norm, modules.lm_head), ids, None)


@dataclass(frozen=True)
class Case:
    """A prompt, the target's completion of it, and the captured states of both."""

    prompt: list[int]
    completion: list[int]
    sample: CapturedSample


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    model, modules = tiny_target()
    capture = HiddenStateCapture(model, modules, AUX)
    found = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(VOCAB - 1, (3 + seed,), generator=generator).tolist()
        ids = torch.tensor(prompt)
        while len(ids) < len(prompt) + LIMITS["max_new_tokens"] and ids[-1] != END:
            ids = torch.cat([ids, model(input_ids=ids[None]).logits[0, -1:].argmax(-1)])
        mask = torch.arange(len(ids)) >= len(prompt)
        [(aux, final)] = capture.capture([ids])
        found.append(Case(prompt, ids[len(prompt) :].tolist(), CapturedSample(ids, mask, aux, final)))
    assert {case.completion[-1] == END for case in found} == {True, False}
    return found


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, [1, 2, 4, 8]),
        ({"fc_norm": False, "norm_output": False}, [4]),
        ({"draft_vocab_size": VOCAB}, [4]),
        (MLA | {"num_attention_heads": 4, "num_hidden_layers": 2}, [4]),
        (DSPARK | {"dspark": DSparkShape(4, END, 5)}, [1, 2, 4]),
    ],
    ids=["eagle3.1", "eagle3", "full vocabulary", "mla", "dspark"],
)
def test_completions_are_the_targets_and_replay_equals_decoding(
    cases: list[Case], changes: dict, lengths: Sequence[int]
) -> None:
    model, modules = tiny_target()
    target = TargetDecoder(model, modules, AUX)
    drafter, frozen = drafter_for(modules, **changes)
    batches = [pack_row([case.sample], len(case.sample.input_ids)) for case in cases]
    hits_of = [partial(greedy_hits, drafter, frozen, batch) for batch in batches]
    by_length = zip(*(by_draft_length(drafter, max(lengths), hits) for hits in hits_of), strict=True)
    compared = {of_batches[0][0]: [one[1:] for one in of_batches] for of_batches in by_length}
    for k in lengths:
        accepted: list[int] = []
        for case, (hits, supervised) in zip(cases, compared[k], strict=True):
            ours = decode_speculatively(target, drafter, frozen, case.prompt, draft_tokens=k, **LIMITS)
            assert ours.token_ids == case.completion
            assert ours.accepted == [n for _, n in replayed_drafts(hits, supervised, k)]
            accepted += ours.accepted
        # Agreement means something only if some drafts are accepted and some rejected.
        assert 0 < sum(accepted) < len(accepted) * k
