"""Options from a file: those of the command line; and what a run has written gives it again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import parallel_sgd
from parallel_sgd import UserError
from parallel_sgd.algorithms import ALGORITHMS
from parallel_sgd.command_line import arguments_of, described_as_config, parser, read
from parallel_sgd.command_line.train.config import settable
from parallel_sgd.optimizers import OPTIMIZERS
from parallel_sgd.options import all_options
from parallel_sgd.training import (
    AutoLearningRate,
    AutoMinibatchSize,
    NotFinitePolicy,
    RunFolder,
)

PACKAGE = Path(parallel_sgd.__file__).parent

LINES = [
    "",
    "--gradient-bits 0:4,2000:1 --bits-of *.bias:32,<1024:16 --overlap",
    "--lr cosine:0:0.3,40000:0.001 --minibatch-size 0:64,1000:128 --rate-follows sqrt",
    "--lr warmup:500:cosine:0:0.3,40000:0.001 --algorithm powersgd",
    "--lr warmup:500:0.5 --momentum 0.5 --optimizer momentum",
    "--lr linear:0:0,1000:0.3 --no-plot --compare-serial --device cpu",
    "--lr 0:0.3,1000:0.1 --algorithm block-momentum --sync-period 640 --no-reset-sgd-momentum "
    "--optimizer momentum --momentum-time-constant 2000",
    "--algorithm async --mode bounded --staleness 3 --lr-per-sample 0.001 --hidden 64 32",
    "--auto-learning-rate --learn-rate-decrease-factor 0.5 --no-load-best-model --patience 3",
    "--auto-minibatch-size --trial-samples 64 --validation 0.1 --criterion accuracy --restore-best",
    "--shares measured --epochs 2",
    "--shares 3,1,0.5",
    "--data x.npz --reader a=[1,2] b=text --task regression --checkpoint-every-s 2.5 --tensorboard",
]


def written(tmp_path, *given):
    """What `--print-config` writes of these options, as a file."""
    file = tmp_path / "config.toml"
    file.write_text(described_as_config(*read(given), whole=True))
    return file


@pytest.mark.parametrize("line", LINES)
def test_a_file_gives_the_options_that_it_was_written_from(tmp_path, line):
    given = line.split()
    options, *chosen = read(given)
    file = written(tmp_path, *given)
    again, *others = read([str(file)])
    assert chosen == others
    for name in {"lr", "lr_per_sample"} & vars(again).keys():
        assert getattr(again, name) == getattr(others[1], name)
    own = {name: value for name, value in vars(options).items() if name in vars(again)}
    assert own == {name: vars(again)[name] for name in own}
    assert file.read_text() == described_as_config(again, *others, whole=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_another_choice_than_the_files(tmp_path, algorithm, optimizer):
    """Goes on with what both have; what a file has of its own choice alone has no effect then, but
    is refused where somebody has set it."""
    file = written(tmp_path, "--epochs", "3", "--optimizer", "momentum", "--lr", "0.5")
    chosen = ["--algorithm", algorithm, "--optimizer", optimizer]
    options, *made = read([str(file), *chosen])
    assert options.epochs == 3
    both = ["--gradient-bits", "32", "--residual-decay", "1"]  # which the file has set
    common = both if algorithm == "sparseloco" else []
    alone = read([*chosen, "--lr", "0.5", *common])[1:]
    assert made == [*alone]
    with pytest.raises(UserError, match=r"--momentum=0\.9 is not an option of"):
        read([str(file), *chosen, "--momentum", "0.9"])
    file.write_text('optimizer = "momentum"\n')
    assert read([str(file), *chosen])[1:] == read(chosen)[1:]
    file.write_text('optimizer = "momentum"\nmomentum = 0.8\n')
    with pytest.raises(UserError, match=r"--momentum=0\.8 is not an option of"):
        read([str(file), *chosen])


def test_the_command_line_goes_before(tmp_path):
    file = written(tmp_path, "--epochs", "3", "--hidden", "8")
    options, _, optimizer = read([str(file), "--epochs", "5", "--lr", "0.5", "--no-plot"])
    assert (options.epochs, options.hidden, options.no_plot) == (5, [8], True)
    assert optimizer.lr == 0.5


def test_learning_rates_of_the_command_line_go_before(tmp_path):
    file = written(tmp_path)
    _, _, optimizer = read([str(file), "--lr-per-sample", "0.001"])
    assert (optimizer.lr, optimizer.lr_per_sample) == (None, 0.001)
    _, _, optimizer = read([str(file), "--optimizer", "adam"])
    assert optimizer.lr == 0.001  # Adam's own, not SGD's
    file = written(tmp_path, "--lr", "0.25")
    _, _, optimizer = read([str(file), "--optimizer", "adam"])
    assert optimizer.lr == 0.25


def test_values_as_toml_has_them(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(
        'hidden = [64, 32]\nlr = "cosine:0:0.3,1000:0.01"\nno-plot = true\noverlap = false\n'
        "auto-learning-rate = true\nload-best-model = false\n[gradient_bits]\n0 = 4\n500 = 1\n"
    )
    options, algorithm, _ = read([str(file)])
    assert options.hidden == [64, 32] and options.no_plot and not options.load_best_model
    assert dict(algorithm.gradient_bits) == {0: 4, 500: 1} and not algorithm.overlap
    file.write_text("[reader]\nsize = [32, 32]\ny = 'price'\n")
    assert arguments_of(file, parser()) == ["--reader", "size=[32, 32]", 'y="price"']


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "gradient_bit = 1",
            "'gradient_bit' is not an option of train.py: did you mean 'gradient_bits",
        ),
        ("xyzzy = 1", "'xyzzy' is not an option of train.py"),
        ("version = 1", "'version' is not an option of train.py"),
        ("print_config = true", "'print_config' is not an option of train.py"),
        ("epochs = ", "is not well-formed TOML: "),
        ("epochs = 1\nepochs = 2", "is not well-formed TOML: "),
        ("\udcff", "is not well-formed TOML: "),
        (
            "minibatch-size = 4\nminibatch_size = 8",
            "'minibatch-size' and 'minibatch_size' are the same",
        ),
        (f"epochs = {'1' * 5000}", ": a number in it must have fewer digits"),
        (f"epochs = 0x{'f' * 5000}", "epochs must be a number of fewer digits"),
        (f"[{'a.' * 100_000}a]", "has more than 10000 dots"),
        ("epochs = 'many'", "--epochs: invalid int value: 'many'"),
        ("epochs = 1.5", "--epochs: invalid int value: '1.5'"),
        ("epochs = true", "--epochs: invalid int value: 'true'"),
        ("epochs = [1, 2]", "epochs=[1, 2] must be a number, a text, true or false"),
        ("epochs = 1979-05-27", "epochs=datetime.date(1979, 5, 27) must be a number, a text"),
        ("algorithm = 'magic'", "--algorithm: invalid choice: 'magic'"),
        ("lr = 'high'", "--lr: lr='high' must be a number, or samples:rate pairs"),
        ("overlap = 1", "overlap=1 must be true or false"),
        (
            "[optimizer]\nlr = 0.1",
            "optimizer={'lr': 0.1} must be one value: options stand at the top",
        ),
        ("no_plot = 'yes'", "no_plot='yes' must be true or false"),
        ("minibatch_size = '0:8,90:16,50:32'", "must have increasing numbers of samples"),
    ],
)
def test_what_is_wrong_with_a_file(tmp_path, text, message):
    file = tmp_path / "config.toml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        read([str(file)])
    assert str(caught.value).startswith(str(file)) and message in str(caught.value)


def test_a_byte_order_mark_and_a_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.toml").write_bytes(b"\xef\xbb\xbfoutput = '~/x'\nepochs = 3\n")
    options, *_ = read(["~/config.toml", "--resume=~/old"])
    assert (options.epochs, options.output) == (3, str(tmp_path / "x"))
    assert options.resume == str(tmp_path / "old")
    with pytest.raises(
        UserError, match=r"'~no-such-user/x' must be .* home folder .* './~no-such-user/x'"
    ):
        read(["--output=~no-such-user/x"])


def a_run(folder, *given):
    """The folder of a run with these options."""
    RunFolder(folder, {}, config=described_as_config(*read(given))).create()
    return str(folder)


def test_a_run_that_goes_on_has_its_own_options_where_nothing_else_is_said(tmp_path):
    line = ["--algorithm", "diloco", "--lr", "0.3", "--hidden", "7", "--checkpoint-every", "50"]
    run = a_run(tmp_path / "run", *line)
    (tmp_path / "run" / "checkpoints").mkdir()
    for path in (run, run + "/checkpoints", run + "/checkpoints/000000000050"):
        options, algorithm, optimizer = read(["--resume", path, "--epochs", "99"])
        assert (options.hidden, options.checkpoint_every, options.epochs) == ([7], 50, 99)
        assert type(algorithm).__name__ == "DiLoCo" and optimizer.lr == 0.3
        assert options.resume == path and options.output is None
    other = tmp_path / "other.toml"
    other.write_text("hidden = [5]\n")
    options, algorithm, _ = read([str(other), "--resume", run])  # a file that is given is the file
    assert options.hidden == [5] and type(algorithm).__name__ == "DataParallelSGD"
    with pytest.raises(UserError, match=r"the same run.*: omit --output"):
        read(["--resume", run, "--output", f"{run}/../run"])
    options, algorithm, _ = read(["--resume", run, "--output", str(tmp_path / "new")])
    assert options.hidden == [7] and type(algorithm).__name__ == "DiLoCo"


def test_what_a_folder_that_is_in_use_asks_for(tmp_path):
    run = a_run(tmp_path / "run")
    with pytest.raises(
        UserError, match=f"new or empty folder: it contains a run, which --resume {run} "
    ):
        RunFolder(run, {}).create()
    (tmp_path / "run" / "options.json").rename(tmp_path / "run" / ".options.json.part")
    RunFolder(run, {}).create()  # a run that was killed as it wrote that has left nothing to keep


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UserError, match=r"there is no such file|Is a directory"):
            read([str(path)])
    with pytest.raises(UserError, match=r"config='a.toml' must be the first argument"):
        read(["--epochs", "3", "a.toml"])


def attributes_read(folder: Path) -> set[str]:
    """The names of all attributes that the sources below a folder read, and texts that name one."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                names.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                names |= {one.value for one in node.args if isinstance(one, ast.Constant)}
    return names


def test_every_option_is_read():
    """An option that nothing reads would be obeyed by nobody."""
    in_train = attributes_read(PACKAGE / "command_line")
    of_adjusting = {
        option.name
        for kind in (AutoMinibatchSize, AutoLearningRate, NotFinitePolicy)
        for option in all_options(kind)
    }
    of_classes = {
        option.name
        for kind in [*ALGORITHMS.values(), *OPTIMIZERS.values()]
        for option in all_options(kind)
    } | of_adjusting
    named = {"auto_minibatch_size", "auto_learning_rate"}  # in `ADJUSTMENTS`
    own = {action.dest for action in settable(parser())} - of_classes - named
    assert own - in_train == set()
    assert of_classes - attributes_read(PACKAGE) == set()
    assert "xyzzy" not in in_train and len(own) > 30 and len(of_classes) > 40
