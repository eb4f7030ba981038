"""Which files and folders are trained on, and which tested on: never test rows in silence."""

from __future__ import annotations

import re

import numpy as np
import pytest
from PIL import Image
from reader_table import write_columns

from parallel_sgd import UserError, data
from parallel_sgd.data.readers.parts import named

TRAIN, OTHER, TEST, REST = 1, 2, 3, 4  #: what values tell of which part they are

DOUBT = "must hold a training part and a test part"
BOTH = "holds training data and test data: data.load_train_test opens both"

#: Names with the part that each is, and what follows: the values of (training, test), or an error.
FILES = [
    ({"train-0": TRAIN, "test-0": TEST}, (TRAIN, TEST)),
    ({"train-00000-of-00001": TRAIN, "validation-00000-of-00001": TEST}, (TRAIN, TEST)),
    ({"adult_train": TRAIN, "adult_test": TEST}, (TRAIN, TEST)),
    ({"data.train": TRAIN, "data.test": TEST}, (TRAIN, TEST)),
    ({"training": TRAIN, "testing": TEST}, (TRAIN, TEST)),
    ({"x_train": TRAIN, "x_test": TEST}, (TRAIN, TEST)),
    ({"Xtrain": TRAIN, "Xtest": TEST}, (TRAIN, TEST)),
    ({"trainSet": TRAIN, "TESTSET": TEST}, (TRAIN, TEST)),
    ({"trn": TRAIN, "tst": TEST}, (TRAIN, TEST)),
    ({"train2017": TRAIN, "val2017": TEST}, (TRAIN, TEST)),
    ({"train": TRAIN, "hold-out": TEST}, (TRAIN, TEST)),
    ({"train": TRAIN, "dev": TEST}, (TRAIN, TEST)),
    ({"train": TRAIN, "holdout": TEST, "dev": REST}, (TRAIN, TEST)),
    ({"train": TRAIN, "test": TEST, "validation": REST}, (TRAIN, TEST)),
    ({"Train/0": TRAIN, "Test/0": TEST}, (TRAIN, TEST)),
    ({"split=train/0": TRAIN, "split=eval/0": TEST}, (TRAIN, TEST)),
    ({"train/a": TRAIN, "valid/a": REST, "test/a": TEST}, (TRAIN, TEST)),
    ({"train": TRAIN, "test": TEST, "more": OTHER}, DOUBT),
    ({"train": TRAIN, "gold": TEST}, DOUBT),
    ({"part-0": TRAIN, "test": TEST}, DOUBT),
    ({"a": TRAIN, "holdout/b": TEST}, DOUBT),
    ({"train": TRAIN, "test": TEST, "train_test": OTHER}, DOUBT),
    ({"train": TRAIN, "training": TRAIN, "test": TEST}, DOUBT),
    ({"train": TRAIN, "test": TEST, "holdout": TEST}, DOUBT),
    ({"test": TRAIN, "val": TEST}, DOUBT),
    ({"train/0": TRAIN, "test/0": TEST, "other/0": OTHER}, DOUBT),
]

#: As above, of folders with the classes a and b in each; "/" before the name: images in it.
FOLDERS = [
    ({"train": TRAIN, "valid": TEST}, (TRAIN, TEST)),
    ({"Training": TRAIN, "Testing": TEST}, (TRAIN, TEST)),
    ({"seg_train/seg_train": TRAIN, "seg_test/seg_test": TEST}, (TRAIN, TEST)),
    ({"train_images": TRAIN, "test_images": TEST}, (TRAIN, TEST)),
    ({"train": TRAIN, "test": TEST, "validation": REST}, (TRAIN, TEST)),
    ({"train": TRAIN, "test": TEST, "unlabeled": OTHER}, DOUBT),
    ({"train": TRAIN, "extra": TEST}, DOUBT),
    ({"train": TRAIN, "dev": TEST, "val": TEST}, DOUBT),
    ({"train": TRAIN}, "whose subfolders may be classes"),
    ({"cat/train": TRAIN, "cat/test": TEST}, "must hold images of one class: it holds folders"),
    ({"data/train": TRAIN, "data/test": TEST}, "must hold images of one class: it holds folders"),
]


def write_part(path, value):
    write_columns(path, {"x": [float(value)] * 4, "y": [0, 1, 0, 1]})


def write_image(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((2, 2), value, np.uint8)
    Image.fromarray(pixels).save(path)


def values(dataset):
    return {round(float(x) * (255 if x < 1 else 1)) for x in dataset.arrays()[0].ravel()}


def look(folder, expected):
    """See what each way to open a folder does."""
    if isinstance(expected, tuple):
        said = []
        train, test = data.load_train_test(folder, say=said.append)
        assert (values(train), values(test)) == ({expected[0]}, {expected[1]})
        assert len(said) == 1 and said[0].startswith(
            f"training data: {train!r}; test data: {test!r}"
        )
        with pytest.raises(UserError, match=re.escape(f"{folder} {BOTH}")):
            data.load(folder)
        return said[0]
    for reader in (data.load, data.load_train_test):
        with pytest.raises(UserError, match=expected) as refused:
            reader(folder)
        assert str(folder) in str(refused.value) and "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(("names", "expected"), FILES, ids=["+".join(names) for names, _ in FILES])
def test_files_of_columns(names, expected, tmp_path):
    for name, value in names.items():
        write_part(tmp_path / f"{name}.parquet", value)
    line = look(tmp_path, expected)
    if REST in names.values():
        (rest,) = (name.split("/")[0] for name, value in names.items() if value == REST)
        assert re.search(rf"; skipped: {tmp_path}/{rest}(\.parquet)?$", line)
    if not isinstance(expected, tuple):
        with pytest.raises(UserError, match=expected):
            data.load_parquet(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"), FOLDERS, ids=["+".join(names) for names, _ in FOLDERS]
)
def test_folders_of_images(names, expected, tmp_path):
    for name, value in names.items():
        for kind in "ab":
            write_image(tmp_path / name / kind / "0.png", value)
    if isinstance(expected, tuple):
        (tmp_path / "annotations").mkdir()  # without images: no part, and no class
    look(tmp_path, expected)
    with pytest.raises(UserError):
        data.ImageFolder(tmp_path)


def test_test_images_without_labels_are_no_class(tmp_path):
    for name in ("cat", "dog", "test"):
        write_image(tmp_path / name / "0.png", 1)
    look(tmp_path, DOUBT)
    with pytest.raises(
        UserError, match="; or give names= of all classes, if the folders are classes"
    ):
        data.ImageFolder(tmp_path)
    for reader in (data.load, data.ImageFolder):
        assert reader(tmp_path, names=["cat", "dog", "test"]).classes == 3
    train, test = data.load_train_test(tmp_path, names=["cat", "dog", "test"])
    assert (len(train), len(test)) == (2, 1)


@pytest.mark.parametrize(
    "classes",
    [("bullet_train", "cat", "test_tube"), ("bus", "car", "train"), ("contest", "latest")],
)
def test_classes_that_are_called_nearly_so(tmp_path, classes):
    for name in classes:
        write_image(tmp_path / name / "0.png", 1)
    assert data.load(tmp_path).names == classes


def test_files_of_one_kind_are_one_data_set(tmp_path):
    for part in range(3):
        write_part(tmp_path / f"test-{part}.parquet", part)
    assert len(data.load(tmp_path)) == 12
    assert [len(part) for part in data.load_train_test(tmp_path, test=0.25)] == [9, 3]


def test_labels_of_another_part_are_refused(tmp_path):
    for name in ("x_train", "y_train", "y_test"):
        np.save(tmp_path / f"{name}.npy", np.arange(4))
    assert len(data.load(tmp_path / "x_train.npy", tmp_path / "y_train.npy")) == 4
    with pytest.raises(
        UserError, match=r"y_test.npy' belongs to a different part of the data than .*/x_tr"
    ):
        data.load(tmp_path / "x_train.npy", tmp_path / "y_test.npy")


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("train_images", "train_labels", "val_images", "val_labels"),
        ("Xtrain", "ytrain", "Xtest", "ytest"),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_a_file(names, save, tmp_path):
    arrays = [np.full((3, 2), TRAIN), np.arange(3), np.full((2, 2), TEST), np.arange(2)]
    held = dict(zip(names, arrays, strict=True))
    save(tmp_path / "d.npz", **held)
    look(tmp_path / "d.npz", (TRAIN, TEST))
    save(tmp_path / "d.npz", **held, more=np.ones(3))
    look(tmp_path / "d.npz", DOUBT)
    del held[names[3]]
    save(tmp_path / "d.npz", **held)
    with pytest.raises(UserError, match="must hold one x and one y of each part: it holds"):
        data.load_train_test(tmp_path / "d.npz")


def test_texts(tmp_path):
    for name, text in (("wiki.train", "a"), ("wiki.test", "b"), ("wiki.valid", "c")):
        (tmp_path / f"{name}.txt").write_text(text * 50)
    train, test = data.text_sequences(tmp_path, context=4)
    assert (set(train.arrays()[1].ravel()), set(test.arrays()[1].ravel())) == ({97}, {98})
    (tmp_path / "more.txt").write_text("d" * 50)
    with pytest.raises(UserError, match=rf"{DOUBT}.*; test=0\.1 splits the whole text by bytes$"):
        data.text_sequences(tmp_path, context=4)
    train, test = data.text_sequences(tmp_path, context=4, test=0.1)
    assert [len(both.arrays()[1]) for both in (train, test)] == [44, 4]
    for part, text in (("Train", "a"), ("dev", "b"), ("__MACOSX", "c"), (".git", "c")):
        (tmp_path / "b" / part).mkdir(parents=True)
        (tmp_path / "b" / part / "deep.txt").write_text(text * 50)
    train, test = data.text_sequences(tmp_path / "b", context=4)
    assert (set(train.arrays()[1].ravel()), set(test.arrays()[1].ravel())) == ({97}, {98})
    (tmp_path / "c" / "tests").mkdir(parents=True)
    (tmp_path / "c" / "tests" / "a.py").write_text("c" * 50)
    (tmp_path / "c" / "a.py").write_text("c" * 50)
    both = data.text_sequences(tmp_path / "c", context=4, suffixes=(".py",))
    assert sum(map(len, both)) > 20  # a program and its tests


@pytest.mark.parametrize(
    "names",
    [
        ["emma.txt", "moby dick.txt", "the test of honour.txt", "the train of honours.txt"],
        ["choosing.md", "training.md"],
        ["data/parts.py", "training/learner.py", "validation.py"],
        ["test.txt", "emma.txt"],
    ],
    ids=lambda names: names[0],
)
def test_texts_whose_names_only_look_like_parts(tmp_path, names):
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a" * 40)
    train, test = data.text_sequences(tmp_path, context=1, suffixes=("",))
    size = 40 * len(names)
    assert (len(train), len(test)) == (size - size // 10 - 1, size // 10 - 1)


def test_what_names_say():
    for name, kind in [
        *[(name, "train") for name in ("train", "TRAIN", "X_train", "trainImages", "training-set")],
        *[(name, "validation") for name in ("val", "Validation", "dev", "evaluation_data")],
        *[(name, "test") for name in ("test1", "seg_test", "tests", "heldout", "held_out")],
        *[(name, "") for name in ("latest", "device", "value", "trained", "train_valid", "retest")],
    ]:
        assert named(name).kind == kind, name
