"""A worker of random states, which some samples end or hang."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from data.capture.worker import serve
from tests.data.capture.delivery import random_states

DEADLY, HANGING = 100_001, 100_002  # first tokens


class FaultyStates:
    """The states of `random_states`, but for samples that begin with one of the tokens above."""

    def capture(self, batch: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        first = {int(ids[0]) for ids in batch}
        if DEADLY in first:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANGING in first:
            time.sleep(600)
        return [random_states(ids) for ids in batch]


def open_faulty_states(settings: dict[str, Any]) -> FaultyStates:
    return FaultyStates()


if __name__ == "__main__":
    serve(open_faulty_states)
