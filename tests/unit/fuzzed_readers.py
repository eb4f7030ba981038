"""Everything that reads files, or bytes of other ranks: what `fuzzing` tries. One function of each
pair writes what is right, the other reads it as a user would."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fuzzing import Files, Reader
from reader_table import DAMAGED, LABELS, VALUES, Row, write_idx

import parallel_sgd as psgd
from parallel_sgd import Communicator, Learner, Parameters, UserError, data
from parallel_sgd.command_line import described_as_config, read
from parallel_sgd.command_line.info import _shapes_in
from parallel_sgd.communication import packed, unpacked
from parallel_sgd.embedding import ServedTables
from parallel_sgd.launcher import MPICH, OPEN_MPI, allocation, read_hostfile
from parallel_sgd.parameter_server import RecordedOrder, ReplayedOrder, wire
from parallel_sgd.training import MANIFEST, read_model
from parallel_sgd.training.checkpoint.files import CHECKSUM_FIELD

NUMBERS = b"0123456789.+-eE \t\r\n"
WORDS = (b"0", b"1", b"-1", b"3", b"0.5", b"1e308", b"1e999", b"true", b"false", b"9" * 40, b"-0.0")
WORDS += (b'""', b'"x"', b'"0"', b'"0:1,5:2"', b'"\\u0000"', b"[]", b"[[]]", b"[1, 2]", b'"../x"')
TOML = (*WORDS, b"nan", b"-inf", b"{a = 1}", b"1979-05-27", b"'*.b:32'", b'"warmup:5:cosine:0:1"')
TOML += (b"'<9:16,*:4'", b"0x7fffffffffffffff", b'"momentum"', b'"adam"', b'"async"', b'"diloco"')
DOCUMENT = (*WORDS, b"null", b"NaN", b"Infinity", b'{"a": 1}', b'"parameters"', b'"float32"')

JSON = NUMBERS + b'{}[]",:\\u nulltruefalse'

Give = Callable[..., Any]


def read_whole(dataset: Any, **options: Any) -> None:
    """As training and an evaluation do: some samples in an odd order, and all of a small one."""
    length = len(dataset)
    if length:
        dataset.read(np.array([length - 1, 0, length // 2]), **options)
        dataset.read(np.arange(min(length, 64)), **options)
        dataset.targets(np.arange(min(length, 64)))


def of_format(name: str, write: Give, symbols: bytes = b"", **options: Any) -> Reader:
    """A file that `data.load` reads."""

    def opened(folder: Path) -> None:
        read_whole(data.load(folder / name, **options))

    return Reader(lambda folder: write(folder / name), opened, symbols)


# Data


def of_row(row: Row) -> Reader:
    """The files of a format, which `data.load` reads."""
    names: list[Path] = []

    def write(folder: Path) -> None:
        names[:] = [
            path.relative_to(folder) for path in row.write(folder, VALUES[::8], LABELS[::8])
        ]

    return Reader(write, lambda folder: read_whole(row.load(tuple(folder / n for n in names))))


def _mnist(folder: Path) -> None:
    for part in ("train", "t10k"):
        for name, shape in (("images-idx3", (3, 28, 28)), ("labels-idx1", (3,))):
            write_idx(folder / f"{part}-{name}-ubyte.gz", np.ones(shape, np.uint8))


def _mnist_read(folder: Path) -> None:
    for part in data.load_train_test(folder):
        read_whole(part)


CSV = b'a,b,city,label\n0.5,3,"Rome, Italy",cat\n-1e3,true,Oslo,dog\r\n7,5,"a\nb",cat\n'
LIBSVM = b"# comment\n1 qid:3 1:0.5 4:-1e-3 # more\r\n0 2:1\n1 1:+3 3:.5\n"
CNTK = b"|x 1 2.5 -3e-1\t|label 2:1 |# comment\n|label 0:1|x\t4 5 6 \r\n|x 7 8 9 |label 3:1\n"
CNTK_SEQUENCES = b"7 |word 3:1 |tag 1 0\n7 |word 5:1 |tag 0 1\n8 |word 2:1 |tag 0 1\n"
TOKENS = {"word": data.Sparse(6, one_hot=True), "tag": data.Dense(2, one_hot=True)}


def _cntk_sequences(folder: Path) -> None:
    sequences = data.load_cntk_sequences(folder / "a.ctf", TOKENS)
    sequences.read_streams(np.arange(len(sequences)))


def _texts(folder: Path) -> None:
    for part in data.text_sequences(folder, context=8):
        read_whole(part)


# Models, and how a run is described


def _config(folder: Path) -> None:
    given = "--lr 0:0.3,1000:0.1 --gradient-bits 0:4,2000:1 --bits-of *.bias:32 --hidden 8 4"
    (folder / "config.toml").write_text(described_as_config(*read(given.split()), whole=True))


def _hosts(folder: Path) -> None:
    (folder / "openmpi").write_text("# all\nn0 slots=4 max_slots=8\nn1.example.org\nn2 slots = 1\n")
    (folder / "mpich").write_text("n0:4 binding=user:0,1 ifname=eth0\n10.0.0.7:2\n# small\nn2\n")


def _hosts_read(folder: Path) -> None:
    for name, dialect in (("openmpi", OPEN_MPI), ("mpich", MPICH)):
        hostfile = read_hostfile(folder / name)
        hostfile.most_ranks_on_a_host(3, 1)
        hostfile.mpiexec_options(dialect)


def _pbs(folder: Path) -> None:
    environ = {"PBS_NODEFILE": str(folder / "nodes"), "PBS_JOBID": "1"}
    assert allocation(environ) is not None


def _model(folder: Path) -> None:
    np.savez(folder / "model.npz", **{"layer/W": np.ones((3, 2), np.float32), "b": np.ones(2)})
    np.savez_compressed(folder / "packed.npz", b=np.ones(2))


def _model_read(folder: Path) -> None:
    problems = []
    for name in ("model.npz", "packed.npz"):
        for reader in (read_model, _shapes_in):
            try:
                reader(str(folder / name))
            except UserError as error:
                problems.append(error)
    if problems:
        raise problems[0]


# Checkpoints and what servers keep

TABLE = psgd.Embedding(name="t", width=2, optimizer=psgd.Adagrad(lr=0.1), entry_count=2)
CHECKPOINT = "000000000006"


def _learner(comm: Communicator) -> Learner:
    parameters = Parameters({"w": np.ones((4, 3), np.float32), "b": np.ones(1, np.float32)})
    return Learner(parameters, psgd.Adam(lr=0.1), psgd.DataParallelSGD(gradient_bits=1), comm)


def _torch_learner(comm: Communicator) -> Any:
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return psgd.torch.Learner(model, optimizer, psgd.DataParallelSGD(), comm)


def _torch_step(learner: Any) -> None:
    import torch

    learner.model.zero_grad()
    learner.model(torch.ones(2, 3)).sum().backward()
    learner.step(samples=2)


def _checkpoint(folder: Path, make: Give = _learner) -> None:
    with Communicator.single() as comm:
        learner = make(comm)
        for step in range(3):
            if make is _torch_learner:
                _torch_step(learner)
                continue
            learner.gradient.flat[:] = np.sin(step + learner.comm.rank + np.arange(13))
            learner.step(samples=2)
        with psgd.Checkpoints(folder) as checkpoints:
            checkpoints.save(learner, extra={"note": [1, 2.5]})
        learner.close()


def _checkpoint_read(folder: Path, make: Give = _learner) -> None:
    with Communicator.single() as comm:
        learner = make(comm)
        before = learner.parameters.flat.copy()
        try:
            psgd.load_checkpoint(learner, folder)
        except UserError:
            assert np.array_equal(learner.parameters.flat, before), "changed, and refused"
            raise
        finally:
            learner.close()


def _with_checksums(right: Files, files: Files) -> Files:
    """As somebody writes it who means it."""
    manifest = f"{CHECKPOINT}/{MANIFEST}"
    own = files[manifest]
    if own != right[manifest]:  # the manifest itself was changed
        body = own.rpartition(CHECKSUM_FIELD.encode())[0] or own
    else:
        document = json.loads(own)
        del document["sha256"]
        for name, content in files.items():
            if name != manifest:
                fact = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
                document["files"][Path(name).name] = fact
        body = json.dumps(document, indent=2).removesuffix("\n}").encode()
    body += CHECKSUM_FIELD.encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    return files | {manifest: body + digest + b'"\n}\n'}


def _tables(folder: Path) -> None:
    tables = ServedTables((TABLE,), 0, 1)
    tables.push(0, 0, np.arange(5), np.ones((5, 2), np.float32), 1, 1.0)
    tables.push(0, 0, np.arange(3), np.ones((3, 2), np.float32), 1, 1.0)
    tables.copy()
    tables.write(str(folder))
    tables.wait()


def _tables_read(folder: Path) -> None:
    tables = ServedTables((TABLE,), 0, 1)
    tables.load(str(folder))
    tables.pull(0, np.arange(6))
    tables.push(0, 0, np.arange(6), np.ones((6, 2), np.float32), 1, 1.0)


ORDER = {"servers": "1", "workers": "3"}


def _order(folder: Path) -> None:
    order = RecordedOrder(str(folder), 0, ORDER)
    for worker in (0, 2, 1, 1):
        order.answered(worker)
    order.close()


def _order_read(folder: Path) -> None:
    assert ReplayedOrder(str(folder), 0, ORDER).next() in (None, 0, 1, 2)


# What other ranks send


def _header(folder: Path) -> None:
    message = wire.Message(kind=wire.Kind.PUSH, table=3, clock=17, samples=8, factor=0.1, bits=0.25)
    (folder / "header").write_bytes(message.packed().tobytes())


def _header_mended(right: Files, files: Files) -> Files:
    content = bytearray(files["header"])
    if len(content) == len(right["header"]):
        header = np.frombuffer(content, np.int64)
        header[0] = wire._checksum(header)
    return {"header": bytes(content)}


def _header_read(folder: Path) -> None:
    content = (folder / "header").read_bytes()
    header = np.frombuffer(content[: len(content) // 8 * 8], np.int64)
    again = wire.unpacked(header)
    assert np.array_equal(again.packed()[1:], header[1:]) or len(header) > len(wire.NAMES) + 1


def _objects(folder: Path) -> None:
    array = np.array([(1, 2.5)], [("a", ">i4"), ("b", "<f8", (2,))])
    item = [None, 2**70, (1.5, {"a": array}), {frozenset({1})}, Path("x"), np.float32(1), 1j]
    (folder / "object").write_bytes(packed(item))


READERS: dict[str, Reader] = {
    **{name: of_row(row) for name, row in DAMAGED.items()},
    "npy": replace(of_row(DAMAGED["npy"]), symbols=b"(),:' {}'<f48"),
    "mnist": Reader(_mnist, _mnist_read),
    "csv": of_format("a.csv", lambda path: path.write_bytes(CSV), NUMBERS + b',"', x=["a"]),
    "csv, compressed": of_format(
        "a.csv.gz", lambda path: path.write_bytes(gzip.compress(CSV, mtime=0)), x=["a"]
    ),
    "libsvm": of_format("a.svm", lambda path: path.write_bytes(LIBSVM), NUMBERS + b":#qid"),
    "cntk": of_format(
        "a.ctf",
        lambda path: path.write_bytes(CNTK),
        NUMBERS + b"|:#xlabel",
        streams={"x": data.Dense(3), "label": data.Sparse(4, one_hot=True)},
    ),
    "cntk, sequences": Reader(
        lambda folder: (folder / "a.ctf").write_bytes(CNTK_SEQUENCES),
        _cntk_sequences,
        NUMBERS + b"|:#wordtag",
    ),
    "texts": Reader(lambda folder: (folder / "a.txt").write_text("Some text. " * 20), _texts),
    "config": Reader(
        _config,
        lambda folder: read([str(folder / "config.toml")]),
        JSON + b"=#'_abcdefghijklmnopqrstuvwxyz*<",
        TOML,
    ),
    "hostfile": Reader(_hosts, _hosts_read, NUMBERS + b":=#slotmax_n,"),
    "PBS": Reader(lambda folder: (folder / "nodes").write_text("n0\nn0\nn1\n"), _pbs),
    "model": Reader(_model, _model_read),
    "checkpoint": Reader(_checkpoint, _checkpoint_read, JSON),
    "checkpoint, with checksums": Reader(
        _checkpoint, _checkpoint_read, JSON, DOCUMENT, _with_checksums
    ),
    "checkpoint, PyTorch": Reader(
        lambda folder: _checkpoint(folder, _torch_learner),
        lambda folder: _checkpoint_read(folder, _torch_learner),
        JSON,
        DOCUMENT,
        _with_checksums,
    ),
    "tables": Reader(_tables, _tables_read, JSON),
    "order": Reader(_order, _order_read, JSON, DOCUMENT),
    "header": Reader(_header, _header_read, mend=_header_mended),
    "objects": Reader(_objects, lambda folder: unpacked((folder / "object").read_bytes())),
}
