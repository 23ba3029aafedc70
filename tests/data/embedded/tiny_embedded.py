"""A tiny embedded target, and a library to train it on."""

import textwrap
from pathlib import Path

from data.embedded.corpus import MAX_BODY_CHARACTERS
from data.embedded.target import EmbeddedTarget, TargetSettings, ensure_embedded_target
from data.embedded.training import TrainingSettings

TINY = TargetSettings(
    vocab_size=320,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=32,
    max_positions=256,
    training=TrainingSettings(steps=6, batch_tokens=256, warmup_steps=2),
)


def ensure(cache: Path, library: Path, settings: TargetSettings = TINY) -> EmbeddedTarget:
    return ensure_embedded_target(cache, progress=False, source=library, settings=settings)


def body_of(answer: str) -> str:
    return textwrap.dedent(answer.split("\n", 1)[1])


def write_library(root: Path) -> None:
    """Write modules with 80 different functions, and code that the corpus must leave out."""
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
