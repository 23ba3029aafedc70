"""Which stages have no result yet, and whether the finished results are as they were written."""

import json
import sys
from collections.abc import Sequence

from eagle31.errors import UserError
from train.artifact import Artifact
from train.config.run import Stage
from train.context import RunContext
from train.distributed import read_when_set, shared_values
from train.stages.table import BEST, METRICS, STAGES
from train.stages.training.continuing import link_results, share_continued

_UNFINISHED = "stages/unfinished"


def unfinished_stages(
    context: RunContext, needed: Sequence[Stage], problem: UserError | None = None
) -> list[Stage]:
    """Locate the result of each stage, and return the stages that have none yet, as rank 0 sees it.

    Args:
        problem: why there is no training to continue.

    Raises:
        UserError: the training to continue cannot be continued with these settings.
    """
    for stage in needed:
        if stage in STAGES:
            if stage is Stage.train:
                share_continued(context, STAGES[stage].inputs(context), problem)
            inputs = STAGES[stage].inputs(context)
            artifact = Artifact.locate(context.output_dir / "artifacts", stage.value, inputs)
            context.artifacts[stage] = artifact
    values = shared_values()
    if context.world.is_main:
        link_results(context, [stage for stage in needed if stage in STAGES])
        found = [one.value for one in STAGES if one in needed and not is_finished(context, one)]
        check_training(context, needed, exports=Stage.export.value in found)
        values.set(_UNFINISHED, json.dumps(found))
    return [Stage(name) for name in json.loads(read_when_set(values, _UNFINISHED))]


def is_finished(context: RunContext, stage: Stage) -> bool:
    """Return whether a stage's result is there as it was written. A damaged one is made again, and is named.

    `check_training` compares the files of a training, which is not repeated without a word from the user.
    """
    artifact = context.artifacts[stage]
    if artifact.finished:
        damage = None if stage is Stage.train else artifact.damage(cache_dir=context.cache_dir)
    elif artifact.manifest_path.exists():
        damage = f"{artifact.manifest_path} was altered"
    else:
        return False
    if damage is None:
        return True
    print(f"{stage.value}: made again, because {damage}", file=sys.stderr, flush=True)
    if artifact.directory.is_symlink():  # to another run's result
        artifact.directory.unlink()
    else:
        artifact.reopen()  # before any rank looks
    return False


def check_training(context: RunContext, needed: Sequence[Stage], *, exports: bool) -> None:
    """Check the files of a finished training that this run reads.

    Raises:
        UserError: one is missing or was altered.
    """
    if Stage.train not in needed or not context.artifacts[Stage.train].finished:
        return
    artifact = context.artifacts[Stage.train]
    files = ([BEST] if exports else []) + ([METRICS] if Stage.report in context.config.stages else [])
    damage = artifact.damage(files, context.cache_dir)
    if damage is not None:
        remedy = f"{damage}. Restore the file, or delete this directory to train again."
        raise UserError("train", artifact.directory, remedy)


def check_selected(context: RunContext, stage: Stage) -> None:
    """Raise UserError if a stage without a result is not selected."""
    selected = context.config.stages
    if stage not in selected:
        raise UserError(
            "stages",
            [one.value for one in selected],
            f"They need stage '{stage.value}', which has no result for this configuration; add it.",
        )
