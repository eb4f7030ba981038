"""Messages between two ranks: their order, and bodies that are not what was announced."""

from __future__ import annotations

import numpy as np
import pytest

from parallel_sgd.communication import HEADER_LENGTH, OtherLength

pytestmark = pytest.mark.messages

LENGTHS = (24, 0, 1 << 20, 24)


def header(number: int) -> np.ndarray:
    return np.full(HEADER_LENGTH, number, np.int64)


@pytest.mark.parametrize("expected", [0, 8, -8])
def test_messages_come_in_order_and_as_long_as_announced(comm, mpi_counts_to, expected):
    """Every rank has the next one for its server; a body of another length does not end anything,
    and leaves the messages behind it as they are."""
    mpi_counts_to(300_000)
    comm.barrier()
    to, of = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    client = comm.endpoint([to], serving=False)
    server = comm.endpoint([of], serving=True)
    sending = [
        client.send(to, header(i), np.full(length, comm.rank, np.uint8) if length else None)
        for i, length in enumerate(LENGTHS)
    ]
    for i, length in enumerate(LENGTHS):
        ((sender, came),) = server.until(lambda: server.arrivals() or None)
        assert sender == of and (came == i).all()
        server.listen(of)
        if not length:
            continue
        assert server.next_body_length(of) in (0, length)
        into = np.full(length + (expected if i == 0 else 0), 255, np.uint8)
        transfer = server.receive(of, into)
        if len(into) == length:
            server.finish([transfer])
            assert (into == of).all()
        else:
            with pytest.raises(OtherLength):
                server.finish([transfer])
            assert transfer.done()
    client.finish(sending)
    comm.barrier()
    client.close()
    server.close()
