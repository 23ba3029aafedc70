from pathlib import Path

import pytest
from datasets import Dataset

from eagle31.errors import UserError
from train.artifact import Artifact
from train.stages.answers import check_answers


@pytest.mark.parametrize(("longest", "refused"), [(4, True), (5, False)])
def test_completions_that_are_all_shorter_than_a_draft_are_refused(
    tmp_path: Path, longest: int, refused: bool
) -> None:
    answers = Artifact("answers", {}, tmp_path)
    for name, num_tokens in (("validation", 9), ("test", longest)):
        rows = {"input_ids": [[1] * (3 + num_tokens), [1, 2, 3, 4]], "num_prompt_tokens": [3, 3]}
        Dataset.from_dict(rows).save_to_disk(tmp_path / name)
    if not refused:
        check_answers(answers, 4)
        return
    with pytest.raises(UserError, match=r"evaluate\.draft_tokens=4"):
        check_answers(answers, 4)
