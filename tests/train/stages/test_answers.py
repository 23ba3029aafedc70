from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from train.artifact import Artifact
from train.config.run import Stage
from train.stages.answers import check_answers


@pytest.mark.parametrize(("longest", "refused"), [(4, True), (5, False)])
def test_completions_that_are_all_shorter_than_a_draft_are_refused(
    tmp_path: Path, longest: int, refused: bool
) -> None:
    config = SimpleNamespace(evaluate=SimpleNamespace(draft_tokens=4))
    context: Any = SimpleNamespace(
        artifacts={Stage.answers: Artifact("answers", {}, tmp_path)}, config=config
    )
    for name, num_tokens in (("validation", 9), ("test", longest)):
        rows = {"input_ids": [[1] * (3 + num_tokens), [1, 2, 3, 4]], "num_prompt_tokens": [3, 3]}
        Dataset.from_dict(rows).save_to_disk(tmp_path / name)
    if not refused:
        check_answers(context)
        return
    with pytest.raises(UserError, match=r"evaluate\.draft_tokens=4"):
        check_answers(context)
