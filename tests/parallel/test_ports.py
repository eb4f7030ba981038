"""Training opens no port: what listens is MPI's, from its start on."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

import parallel_sgd as psgd

pytestmark = [
    pytest.mark.threads(3),
    pytest.mark.ranks(3),
    pytest.mark.filterwarnings("ignore:servers=0"),
]


def listening():
    """The descriptors of this process that are sockets which accept connections."""
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add((descriptor, str(one.getsockname())))
        except OSError:  # it is gone: the folder's own, say
            continue
    return {name for _, name in found}


def test_a_port_is_seen():
    before = listening()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening() - before == {str(server.getsockname())}


def test_training_opens_no_port(comm, tmp_path):
    before = listening()
    folder = comm.allgather_object(str(tmp_path))[0]
    for algorithm in (psgd.DataParallelSGD(gradient_bits=1), psgd.DataParallelASGD(servers=0)):
        parameters = psgd.Parameters({"w": np.zeros(64, np.float32)})
        learner = psgd.Learner(parameters, psgd.SGD(lr=0.1), algorithm, comm)
        for _ in range(3):
            learner.gradient.flat[:] = comm.rank
            learner.step(samples=1)
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner)
        learner.finish()
        assert listening() <= before
