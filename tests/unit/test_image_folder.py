"""Folders of images: classes, sizes, colours, and damaged files, each named by its path."""

from __future__ import annotations

import re
import sys
import zlib
from contextlib import nullcontext

import numpy as np
import pytest

from parallel_sgd import data
from parallel_sgd.errors import UserError

Image = pytest.importorskip("PIL.Image")


def image(path, size=(6, 8), seed=0, mode="RGB"):
    """Write random pixels of (height, width); return them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    channels = () if mode == "L" else (3,)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, *channels), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def folder(tmp_path):
    """Two classes; b has another depth, a suffix in capitals, and files that are no images."""
    for i, name in enumerate(["b/2.png", "b/deep/1.PNG", "a/0.bmp", "a/.hidden.png", "b/3.png"]):
        image(tmp_path / name, seed=i)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    (tmp_path / "readme.png").write_text("no class")
    (tmp_path / ".git").mkdir()
    return tmp_path


def test_images_of_other_names_are_read_or_refused(folder):
    """Never left out in silence."""
    jpeg = folder / "a" / "1.jpg"
    image(jpeg)
    jpeg.rename(jpeg.with_suffix(".JFIF"))
    assert len(data.ImageFolder(folder)) == 5
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "notes.json"):
        (folder / "a" / name).write_bytes(b"\xff\xd8\xff")
    for name in ("__MACOSX", "@eaDir", ".ipynb_checkpoints"):
        for place in (folder, folder / "b"):
            image(place / name / "7.png")
    assert len(data.ImageFolder(folder)) == 5
    (folder / "b" / "video.bin").write_bytes(b"no image")
    for name, content in (
        ("0.heic", b"\0\0\0\x18ftypheic and so on"),
        ("0", (folder / "b" / "2.png").read_bytes()),
        ("0.dng", b"II*\0 and so on"),
    ):
        (folder / "b" / name).write_bytes(content)
        line = f"^{folder}/b/{name} is an image, but its name does not end in one of .bmp, "
        with pytest.raises(UserError, match=line):
            data.ImageFolder(folder)
        (folder / "b" / name).unlink()


def pixels_of(path):
    return np.asarray(Image.open(path).convert("RGB")).transpose(2, 0, 1) / np.float32(255)


def test_images_are_read_by_class_and_path(folder):
    images = data.ImageFolder(folder)
    assert [str(file.relative_to(folder)) for file in images.files] == [
        "a/0.bmp",
        "b/2.png",
        "b/3.png",
        "b/deep/1.PNG",
    ]
    assert images.names == ("a", "b") and images.classes == 2 and len(images) == 4
    x, y = images.read(np.array([3, 0, 3]), classes=2)
    assert x.dtype == np.float32 and x.shape == (3, 3, 6, 8) and x.flags.c_contiguous
    assert y.dtype == np.int64 and y.tolist() == [1, 0, 1]
    for row, index in zip(x, (3, 0, 3), strict=True):
        assert (row == pixels_of(images.files[index])).all()
    assert images.read(np.arange(0))[0].shape == (0, 3, 6, 8)
    assert images.read(np.array([1]), dtype="float64")[0].dtype == np.float64
    assert images.read(np.array([1]), dtype=None)[0].dtype == np.float32
    assert data.count_classes(images) == 2 and images.repeatable
    with pytest.raises(UserError, match=r"y\[3\] = 1 is out of range: must be from 0 to 0"):
        images.read(np.array([0, 3]), classes=1)
    grey = data.ImageFolder(folder, colour="grey").read(np.array([1]))[0]
    expected = np.asarray(Image.open(folder / "b/2.png").convert("L")) / np.float32(255)
    assert grey.shape == (1, 1, 6, 8) and (grey[0, 0] == expected).all()


def test_only_what_is_asked_for_is_decoded(folder):
    (folder / "b" / "3.png").write_bytes(b"nothing")
    images = data.ImageFolder(folder)
    images.read(np.array([0, 1, 3]))
    with pytest.raises(UserError, match=r"b/3.png is not a readable image"):
        images.read(np.array([0, 2]))


def test_other_sizes_are_refused_or_resized_around_the_centre(folder):
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 13:27] = 255
    Image.fromarray(wide).save(folder / "b" / "3.png")
    line = (
        f"^{folder}/b/3.png has 10 x 40 pixels: must have 6 x 8, as the first image, or give size="
    )
    with pytest.raises(UserError, match=re.escape(line[1:])):
        data.ImageFolder(folder).arrays()
    resized = data.ImageFolder(folder, size=(5, 5))
    x, _ = resized.arrays()
    assert x.shape == (4, 3, 5, 5) and (x[2] == 1).all()  # the middle is white
    assert x[0].std() > 0
    same = data.ImageFolder(folder, size=[6, 8]).read(np.array([0]))[0]
    assert (same[0] == pixels_of(folder / "a/0.bmp")).all()


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_all_modes_of_eight_bits_become_rgb_or_grey(tmp_path, mode):
    made = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8) * 5).convert(mode)
    suffix = "tif" if mode == "CMYK" else "png"
    options = {"transparency": b"\x00\x80"} if mode == "P" else {}
    (tmp_path / "a").mkdir()
    made.save(tmp_path / "a" / f"0.{suffix}", **options)
    for colour, channels in (("rgb", 3), ("grey", 1)):
        x, _ = data.ImageFolder(tmp_path, colour=colour).arrays()
        assert x.shape == (1, channels, 6, 8) and x.std() > 0.1


def bomb():
    """A PNG of a few bytes that claims 30000 by 30000 pixels."""

    def chunk(kind, content):
        check = zlib.crc32(kind + content).to_bytes(4, "big")
        return len(content).to_bytes(4, "big") + kind + content + check

    size = (30000).to_bytes(4, "big")
    header = chunk(b"IHDR", size * 2 + bytes([8, 2, 0, 0, 0]))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100)))


def test_what_is_no_image_is_refused_in_one_line(tmp_path, monkeypatch):
    path = tmp_path / "a" / "0.png"
    image(path)
    whole = path.read_bytes()
    deep = Image.fromarray(np.zeros((6, 8), np.uint16))
    deep.save(tmp_path / "deep.png")
    for content, message in [
        (b"", "is not a readable image: cannot identify"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a readable image: can"),
        (whole[: len(whole) // 2], "is not a readable image: "),
        (bomb(), "is not a readable image: Image size .900000000 pixels. exceeds limit of"),
        ((tmp_path / "deep.png").read_bytes(), "has pixels of mode 'I;16': must have 8 bits a"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"^{path} {message}") as caught:
            data.ImageFolder(tmp_path, size=(6, 8)).arrays()
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    refused = pytest.raises(UserError, match=f"^{path} (has 6 x 8 pixels|is not a readable image)")
    for most_pixels, expected in ((40, refused), (None, nullcontext())):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most_pixels)
        with expected:
            data.ImageFolder(tmp_path).arrays()


@pytest.mark.parametrize("testing", ["test", "val"])
def test_parts_share_the_classes_of_the_training(tmp_path, testing):
    for i, name in enumerate(["train/a/0.png", "train/b/0.png", "train/c/0.png"]):
        image(tmp_path / name, seed=i)
    image(tmp_path / testing / "c" / "0.png", seed=9)
    train, test = data.image_folders(tmp_path)
    assert (len(train), len(test)) == (3, 1)
    assert test.read(np.array([0]))[1].tolist() == [2] and test.classes == train.classes == 3
    image(tmp_path / testing / "d" / "0.png")
    with pytest.raises(
        UserError, match=r"must hold no classes but \['a', 'b', 'c'\]: it holds \['d"
    ):
        data.image_folders(tmp_path)


def test_folders_that_hold_no_classes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"must hold a folder of images for each class.*none$"):
        data.ImageFolder(tmp_path)
    for name in ("train.svm", "valid.svm", ".hidden"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"none, but 'train\.svm', 'valid\.svm': give one of these"):
        data.ImageFolder(tmp_path)
    with pytest.raises(UserError, match=r"must hold folders of a training part and a test part"):
        data.image_folders(tmp_path)
    with pytest.raises(UserError, match="/no cannot be read: No such file or directory"):
        data.ImageFolder(tmp_path / "no")
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match=r"/a must hold images of a class, with names that end in "):
        data.ImageFolder(tmp_path)
    image(tmp_path / "a" / "0.png")
    for message, options in [
        (r"size=5 must be two whole numbers, \(height, width\)", {"size": 5}),
        (r"size=\(5, 5, 3\) must be two whole numbers", {"size": (5, 5, 3)}),
        (r"size\[0\]=0 must be a whole number from 1 to 32768", {"size": (0, 5)}),
        ("colour='blue' must be 'rgb' or 'grey'", {"colour": "blue"}),
    ]:
        with pytest.raises(UserError, match=f"^{message}"):
            data.ImageFolder(tmp_path, **options)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"images need Pillow, .*: pip install '\.\[imag"):
        data.ImageFolder(tmp_path)
