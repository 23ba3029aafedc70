"""A sample that is put into a spool at once."""

from torch import Tensor

from data.capture.transport.protocol import StateRequest
from data.capture.transport.spool import Spool


def put(spool: Spool, request: StateRequest, aux: Tensor, final: Tensor) -> None:
    with spool.writing(request) as write:
        write(aux, final)
