"""The embedded target: split, template, cache and resume, with a made-up library and a tiny model."""

import json
import multiprocessing
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from data.embedded import target as target_module
from data.embedded import training
from data.embedded.corpus import MAX_BODY_CHARACTERS, is_held_out, read_corpus
from data.embedded.muon import orthogonalize
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_embedded_target
from data.embedded.tokenizer import train_tokenizer
from data.embedded.training import TrainingSettings, plan_batches
from eagle31.errors import UserError

TINY = TargetSettings(
    vocab_size=320,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=32,
    max_positions=256,
    training=TrainingSettings(steps=6, batch_tokens=256, warmup_steps=2, checkpoint_seconds=0.0),
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    methods = [
        f'    def get_{i}(self, x: int = {i}) -> int:\n        """Adds {i}.\n\n        More."""\n'
        f"        # a remark\n        y = x + {i}\n        return (y)\n"
        for i in range(80)
    ]
    (root / "numbers_.py").write_text("class Outer:\n    class Inner:\n        pass\n\n" + "\n".join(methods))
    copies = [f'def copy_{i}(x):\n    """Differs."""\n    y = x + {i}\n    return y\n' for i in range(80)]
    (root / "copies.py").write_text("\n".join(copies))
    skipped = f'    """Long."""\n    x = "{"a" * MAX_BODY_CHARACTERS}"\n'
    (root / "odd.py").write_text(
        f'def long():\n{skipped}\ndef empty():\n    """Empty."""\n\ndef bare():\n    return "undocumented"\n'
    )
    (root / "broken.py").write_text("def f(:\n")
    (root / "bytes.py").write_bytes(b"\xff\xfe\x00")
    for name in ("test", "site-packages"):
        (root / name).mkdir()
        (root / name / "m.py").write_text('def hidden():\n    """Never read."""\n    return "never read"\n')
    return root


@pytest.fixture(scope="module")
def built(library: Path, tmp_path_factory: pytest.TempPathFactory) -> EmbeddedTarget:
    return _ensure(tmp_path_factory.mktemp("cache"), library)


def _ensure(cache: Path, library: Path, settings: TargetSettings = TINY) -> EmbeddedTarget:
    return ensure_embedded_target(cache, num_threads=1, progress=False, source=library, settings=settings)


def _body(answer: str) -> str:
    return textwrap.dedent(answer.split("\n", 1)[1])


def _bodies(path: Path) -> list[str]:
    return [_body(json.loads(line)["messages"][1]["content"]) for line in path.read_text().splitlines()]


def test_corpus_has_each_documented_body_once(library: Path) -> None:
    corpus = read_corpus(library)
    conversations = corpus.train + corpus.held_out
    answers = [c["messages"][1]["content"] for c in conversations]
    assert len(answers) == 80
    bodies = [answer.split("\n", 1)[1] for answer in answers]
    assert sorted(bodies) == sorted(f"    y = x + {i}\n    return y" for i in range(80))
    assert len({c["id"] for c in conversations}) == 80


def test_request_holds_class_signature_and_summary(tmp_path: Path) -> None:
    source = "\n".join(
        f"class A:\n    async def f{i}(self, x: int = 1) -> int:\n"
        f'        """Adds {i}\n        twice.\n\n        More."""\n        return {i}\n'
        for i in range(60)
    )
    (tmp_path / "m.py").write_text(source)
    user, assistant = read_corpus(tmp_path).train[0]["messages"]
    signature = "async def f0(self, x: int=1) -> int:"
    summary = '    """Adds 0\n    twice."""'
    assert user["content"] == f"Write this function.\n\n# class A\n{signature}\n{summary}"
    assert assistant["content"] == f"{signature}\n    return 0"


def test_split_is_disjoint_deterministic_and_by_body(library: Path) -> None:
    corpus = read_corpus(library)
    assert read_corpus(library) == corpus
    assert corpus.held_out
    assert all(is_held_out(_body(c["messages"][1]["content"])) for c in corpus.held_out)
    assert not any(is_held_out(_body(c["messages"][1]["content"])) for c in corpus.train)


def test_source_without_functions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="too few documented Python functions"):
        read_corpus(tmp_path)


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 <|im_end|>"},
    {"role": "assistant", "content": "\n  y = x + 1\n"},
    {"role": "tool", "content": "ok\n"},
    {"role": "assistant", "content": "return é"},
]


@pytest.mark.parametrize("turn", [2, 4])
def test_generation_prompt_is_an_exact_prefix(built: EmbeddedTarget, turn: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    whole: Any = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    prompt: Any = tokenizer.apply_chat_template(
        CONVERSATION[:turn], add_generation_prompt=True, tokenize=False
    )
    assert whole.startswith(prompt)
    whole_ids = tokenizer(whole)["input_ids"]
    prompt_ids = tokenizer(prompt)["input_ids"]
    assert whole_ids[: len(prompt_ids)] == prompt_ids


def test_assistant_mask_covers_answers_and_end_tokens(built: EmbeddedTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    encoded: Any = tokenizer.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    written = tokenizer.decode([token for token, mine in pairs if mine])
    assert written == "y = x + 1<|im_end|>return é<|im_end|>"


def test_template_refuses_unknown_roles(built: EmbeddedTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    with pytest.raises(Exception, match="unknown role: robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


def test_tokenizer_keeps_every_byte_and_its_special_tokens(library: Path) -> None:
    tokenizer = train_tokenizer(read_corpus(library).train, 300, 256)
    text = "naïve\t\x00 \U0001f600\r\n\n    x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"
    marked = tokenizer("<|im_start|>a<|im_end|>")["input_ids"]
    assert tokenizer.decode(marked, skip_special_tokens=True) == "a"
    assert len(tokenizer) <= 300


def test_batches_cover_each_epoch_once_within_the_budget() -> None:
    lengths = [3 + 7 * i % 50 for i in range(100)] + [400]
    batches = plan_batches(lengths, batch_tokens=128, steps=60, seed=0)
    assert batches == plan_batches(lengths, batch_tokens=128, steps=60, seed=0)
    assert len(batches) == 60
    assert all(len(b) == 1 or max(lengths[i] for i in b) * len(b) <= 128 for b in batches)
    first_epoch = batches[: next(n for n in range(61) if sum(map(len, batches[:n])) >= len(lengths))]
    assert sorted(i for b in first_epoch for i in b) == list(range(len(lengths)))


def test_loss_ignores_prompts_and_padding(built: EmbeddedTarget) -> None:
    model = LlamaForCausalLM.from_pretrained(built.model)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length, prompt in ((9, 4), (23, 8)):
        ids = torch.randint(3, 300, (length,), generator=generator)
        documents.append((ids, torch.arange(length) >= prompt))
    total = training.answer_loss(model, documents)
    tokens = training.num_answer_tokens(documents)
    expected = 0.0
    for ids, mask in documents:
        log_probabilities = model(ids[None]).logits[0, :-1].detach().log_softmax(-1)
        picked = log_probabilities.gather(1, ids[1:, None])[:, 0]
        expected -= float(picked[mask[1:]].sum())
    assert tokens == 5 + 15
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_gradient_of_two_halves_is_that_of_the_whole(built: EmbeddedTarget) -> None:
    model = LlamaForCausalLM.from_pretrained(built.model)
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in (9, 23, 14):
        ids = torch.randint(3, 300, (length,), generator=generator)
        documents.append((ids, torch.arange(length) >= length // 3))
    mean = training.answer_loss(model, documents) / training.num_answer_tokens(documents)
    expected = torch.autograd.grad(mean, list(model.parameters()))
    workers = training.GradientWorkers(model)
    for _ in range(2):  # a second call would show gradients left over in the replica
        model.zero_grad()
        assert workers(documents) == pytest.approx(mean.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8), (1, 16, 16)])
def test_orthogonalize_keeps_directions_and_evens_out_their_scale(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    in_its_basis = u.mT @ orthogonalize(matrices, iterations=8) @ v.mT
    scales = in_its_basis.diagonal(dim1=1, dim2=2)
    assert scales.min() > 0.6
    assert scales.max() < 1.3
    torch.testing.assert_close(in_its_basis, torch.diag_embed(scales), rtol=0, atol=1e-6)


def test_target_loads_with_what_generation_needs(built: EmbeddedTarget) -> None:
    tokenizer = AutoTokenizer.from_pretrained(built.model)
    model = AutoModelForCausalLM.from_pretrained(built.model)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert model.config.bos_token_id is None
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    assert json.loads((built.model / "training.json").read_text())["steps"] == TINY.training.steps


def test_held_out_bodies_are_never_in_the_training_file(built: EmbeddedTarget) -> None:
    train, held_out = _bodies(built.train), _bodies(built.held_out)
    assert train
    assert held_out
    assert not set(train) & set(held_out)


def test_second_call_neither_reads_nor_trains(
    built: EmbeddedTarget, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "read_corpus", None)
    monkeypatch.setattr(target_module, "pretrain", None)
    assert _ensure(built.model.parents[1], library) == built


def test_other_settings_or_modules_are_another_target(library: Path, tmp_path: Path) -> None:
    key = target_module.fingerprint(library, TINY)
    assert target_module.fingerprint(library, replace(TINY, num_layers=3)) != key
    (tmp_path / "m.py").write_text("x = 1\n")
    assert target_module.fingerprint(tmp_path, TINY) != key


def test_a_build_draws_no_bar_where_stderr_is_no_terminal(
    library: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    settings = replace(TINY, training=replace(TINY.training, steps=1))
    shown = transformers_logging.is_progress_bar_enabled()
    ensure_embedded_target(tmp_path, num_threads=1, progress=True, source=library, settings=settings)
    assert "%|" not in capfd.readouterr().err
    assert transformers_logging.is_progress_bar_enabled() == shown


def test_resumed_training_gives_the_same_weights(
    built: EmbeddedTarget, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = training.save_checkpoint

    def save_then_stop(path: Path, model: Any, optimizers: Any, next_step: int) -> None:
        save(path, model, optimizers, next_step)
        if next_step == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(training, "save_checkpoint", save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            _ensure(tmp_path, library)
    assert not any(p.is_dir() and not p.name.endswith(".partial") for p in tmp_path.iterdir())

    resumed_at = []
    monkeypatch.setattr(training, "save_checkpoint", lambda *args: resumed_at.append(args[-1]))
    resumed = _ensure(tmp_path, library)
    assert resumed_at == [4, 5, 6]
    expected = load_file(built.model / "model.safetensors")
    actual = load_file(resumed.model / "model.safetensors")
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert not (resumed.model.parent / "checkpoint.pt").exists()


def _ensure_and_count(cache: Path, library: Path, started: object) -> None:
    build = target_module._build

    def counted(*args: object) -> None:
        (cache / f"built_by_{multiprocessing.current_process().name}").touch()
        build(*args)  # type: ignore[arg-type]

    target_module._build = counted  # type: ignore[assignment]
    started.wait()  # type: ignore[attr-defined]
    _ensure(cache, library)


def test_of_two_processes_one_builds_and_the_other_waits(library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    processes = [
        context.Process(target=_ensure_and_count, args=(tmp_path, library, barrier)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list(tmp_path.glob("built_by_*"))) == 1
