"""Folders of images, a folder for each class; images are decoded singly as they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import UserError
from ...files import opened, reason
from ...validation import checked_path, choice, integer, line_of, shown
from ..dataset import LARGEST_BYTE, Dataset
from ..unchanged import Identity, identity_of, reopened
from ..validation import Array, DType, checked_labels, float_dtype
from .parts import REQUIRED, Parts, both_parts_problem, files_below, is_system_file, named, parts_of

#: Suffixes of images. The permitted DECODERS of Pillow run no external programs.
SUFFIXES = (
    *(".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm"),
    *(".tif", ".tiff", ".webp"),
)
TEXTS = (".txt", ".xml", ".json", ".csv", ".md", ".html", ".yaml", ".yml", ".py", ".npy", ".mat")
#: First bytes of images, of readable and other formats, to check files with other suffixes.
MAGIC = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*"),
    *(b"\0\0\0\x0cjP  ", b"\0\0\0\x0cJXL ", b"\xff\x0a", b"8BPS"),
)
BRANDS = (b"WEBP", b"avif", b"avis", b"heic", b"heix", b"heif", b"mif1", b"msf1")  #: from byte 8
DECODERS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

#: Pillow's modes of 8 bits a colour, converted to RGB or grey without loss of range.
MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}

COLOURS = {"rgb": ("RGB", 3), "grey": ("L", 1)}
MOST_PIXELS = 1 << 15  #: of a side of resized images


class ImageFolder(Dataset):
    """Images in a folder for each class: x [n, channels, height, width] in 0 to 1, y [n].

    Sample i is the i-th file in the order of the classes and then of the paths. An image is decoded
    by Pillow each time it is read (some milliseconds). Of a moving picture the first frame is used.
    Transparency is dropped.

    Args:
        folder: its subfolders are the classes, by sorted names, 0 for the first. All files below a
            subfolder whose names end in one of `SUFFIXES`, in any case, are its images. Hidden
            files and folders and files of operating systems (Thumbs.db, __MACOSX) are skipped. A
            file of another name whose content is an image is an error.
        size: (height, width) to resize each image to, after cropping the longer side at both ends
            to this aspect ratio. None: all images must have the size of the first image.
        colour: "rgb" for 3 channels, "grey" for 1.
        names: the classes' names, by label, instead of the folder's; the folder may have no further
            classes. If subfolders are named as parts of data (train, test, dev), this argument
            declares them to be classes.
    Attributes:
        names: of the classes, by label.
        size: (height, width); None while not known.
        files: the path of each sample.
    Raises:
        UserError: Pillow is missing, an argument is not as required, or there is no class, or a
            class without images. While reading: a file is no image or damaged, has changed, has
            more than 8 bits a colour, has another size, or has more pixels than
            `PIL.Image.MAX_IMAGE_PIXELS`.

    Local: every rank lists the folder, and decodes the images of its own part of each minibatch.
    """

    repeatable = True

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        size: Sequence[int] | None = None,
        colour: str = "rgb",
        names: Sequence[str] | None = None,
    ) -> None:
        self.folder = checked_path("folder", folder)
        self.mode, self.channels = COLOURS[choice("colour", colour, tuple(COLOURS))]
        self.size = None if size is None else _checked_size(size)
        self._resizes = size is not None
        _require_pillow()
        found = _classes(self.folder, named_so=names is not None)
        self.names = tuple(sorted(found) if names is None else names)
        self.classes = len(self.names)
        rest = sorted(set(found) - set(self.names))
        if rest:
            raise UserError(
                f"{self.folder} must hold no classes but {shown(list(self.names))}: it holds "
                f"{shown(rest)}"
            )
        labels = {name: label for label, name in enumerate(self.names)}
        images = [image for name in self.names for image in found.get(name, [])]
        self.files = [path for path, _ in images]
        self._before = np.array([before for _, before in images], np.uint64).reshape(-1, 4)
        of_each = [labels[name] for name in self.names for _ in found.get(name, [])]
        self._labels = np.array(of_each, np.int64)
        self.y_name = f"{self.folder}: y"

    def __len__(self) -> int:
        return len(self.files)

    def read(
        self, indexes: Array, *, dtype: DType = np.float32, classes: int | None = None
    ) -> tuple[Array, Array]:
        """Read samples as `Dataset.read` does, but if `dtype` is None, x is float32."""
        y = self._labels[indexes]
        if classes is not None:
            y = checked_labels(self.y_name, y, indexes, classes)
        if self.size is None:
            self.size = self._size_of_first()
        height, width = self.size
        pixels = np.empty((len(y), height, width, self.channels), np.uint8)
        for image, index in zip(pixels, np.asarray(indexes).tolist(), strict=True):
            image[...] = self._decoded(index, self.size)
        kind = float_dtype(dtype) or np.dtype(np.float32)
        x = pixels.transpose(0, 3, 1, 2).astype(kind, order="C")
        x /= LARGEST_BYTE
        return x, y

    def targets(self, indexes: Array) -> Array:
        return self._labels[indexes]

    def _size_of_first(self) -> tuple[int, int]:
        with self._image(0) as image:
            return image.height, image.width

    def _image(self, index: int) -> AbstractContextManager[Any]:
        return _image(self.files[index], Identity(*self._before[index].tolist()))

    def _decoded(self, index: int, size: tuple[int, int]) -> Array:
        """Return the pixels of an image, uint8 [height, width, channels]."""
        path, (height, width) = self.files[index], size
        with self._image(index) as image:
            if not self._resizes and (image.height, image.width) != size:
                raise UserError(
                    f"{path} has {image.height} x {image.width} pixels: must have {height} x "
                    f"{width}, as the first image, or give size=(height, width) to resize to"
                )
            if image.mode.startswith("P"):  # a palette's transparency needs RGBA
                image = image.convert("RGBA")
            image = image.convert(self.mode)
            if self._resizes:
                bilinear = import_module("PIL.Image").Resampling.BILINEAR
                image = import_module("PIL.ImageOps").fit(image, (width, height), method=bilinear)
            return np.asarray(image).reshape(height, width, self.channels)

    def __repr__(self) -> str:
        return f"ImageFolder({self.folder}, {len(self)} images, {self.classes} classes)"


def image_folders(
    folder: str | os.PathLike[str], *, size: Sequence[int] | None = None, colour: str = "rgb"
) -> tuple[ImageFolder, ImageFolder]:
    """Open the images in ``train/`` and ``test/`` (or ``val/``) of a folder, as (training, test).

    Args:
        folder: contains a training and a test folder, each with a folder for each class. The two
            are recognized by their names, such as Training, seg_train, and testing, validation,
            dev, holdout. A validation folder beside a test folder is skipped. The classes are those
            of the training part: the test part may have no further classes.
        size, colour: as for `ImageFolder`; see there for accepted and refused files. The test part
            gets the training part's size.
    Raises:
        UserError: as for `ImageFolder`, or there are no such folders, or their names leave doubt.

    Local.
    """
    place = checked_path("folder", folder)
    parts = find_image_parts(place)
    if parts is None:
        raise UserError(f"{place} must hold folders of {REQUIRED}")
    if len(parts.train) > 1 or len(parts.test) > 1:
        held = shown([path.name for path in (*parts.train, *parts.test)])
        raise UserError(f"{place} must hold folders of {REQUIRED}: it holds {held}")
    train = ImageFolder(_inner(parts.train[0]), size=size, colour=colour)
    test = ImageFolder(_inner(parts.test[0]), size=train.size, colour=colour, names=train.names)
    return train, test


def find_image_parts(folder: Path) -> Parts | None:
    """Return the parts of a folder; None if its folders are classes, or if it is unreadable. Local.

    Raises:
        UserError: the names leave doubt about the parts.
    """
    try:
        found = _folders(folder)
        kinds = {path: named(path.name).kind for path in found}
        if not {"test", "validation"} & set(kinds.values()):
            train = [path for path, kind in kinds.items() if kind == "train"]
            if not any(map(_folders, train)):
                return None  # "train" may be a class, beside bus and car
        return parts_of(folder, [p for p in found if kinds[p] or _holds_images(p)], classes=True)
    except OSError:  # reported when the folder is read
        return None


def _folders(folder: Path) -> list[Path]:
    found = (Path(entry.path) for entry in os.scandir(folder) if entry.is_dir())
    return sorted(path for path in found if not is_system_file(path.name))


def _files_instead(folder: Path) -> str:
    """Return the end of an error for a folder with files only, perhaps data of another format."""
    names = sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_file() and not is_system_file(entry.name)
    )
    few = f"{', '.join(map(shown, names[:3]))}{', ...' if len(names) > 3 else ''}"
    return f", but {few}: give one of these if it is data" if names else ""


def _holds_images(folder: Path) -> bool:
    return next(iter(files_below(folder, _is_image, is_system_file)), None) is not None


def _inner(part: Path) -> Path:
    """Return a part's folder, or its only subfolder if named the same (as in archives)."""
    inner = _folders(part)
    same = len(inner) == 1 and inner[0].name.lower() == part.name.lower()
    return inner[0] if same else part


def _classes(folder: Path, *, named_so: bool) -> dict[str, list[tuple[Path, Identity]]]:
    """Return the images of each class, in the order of their paths, with their identities.

    Args:
        named_so: True if the user has declared the folders to be classes.
    Raises:
        UserError: the folder cannot be read, there is no class, or a class without images; or the
            folders are, or may be, parts.
    """
    try:
        classes = [path.name for path in _folders(folder)]
        if not classes:
            raise UserError(
                f"{folder} must hold a folder of images for each class: it holds none"
                f"{_files_instead(folder)}"
            )
        if not named_so:
            _require_classes(folder)
        found = {}
        for name in classes:
            files = sorted(files_below(folder / name, _may_be_image, is_system_file))
            below = {named(path.split("/")[0]).kind for path, _ in files if "/" in path}
            if "train" in below and below & {"test", "validation"}:
                raise UserError(
                    f"{folder / name} must hold images of one class: it holds folders of "
                    "training and of test images"
                )
            found[name] = [
                (folder / name / path, identity_of(status))
                for path, status in files
                if _is_image(path) or _require_no_image(folder / name / path)
            ]
            if not found[name]:
                raise UserError(
                    f"{folder / name} must hold images of a class, with names that end in "
                    f"{', '.join(SUFFIXES)}: it holds none"
                )
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be read: {reason(error)}") from None
    return found


def _require_classes(folder: Path) -> None:
    """Raise a UserError if folders are named as parts instead of classes."""
    try:
        parts = find_image_parts(folder)
    except UserError as error:
        raise UserError(
            f"{error}; or give names= of all classes, if the folders are classes"
        ) from None
    if parts is not None:
        raise UserError(both_parts_problem(folder))
    only = [path for path in _folders(folder) if named(path.name).kind and _folders(path)]
    if only and len(only) == len(_folders(folder)):
        raise UserError(
            f"{folder} must hold a folder of images for each class: it holds "
            f"{shown([path.name for path in only])}, whose subfolders may be classes"
        )


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not is_system_file(Path(name).name)


def _may_be_image(name: str) -> bool:
    """Return True unless a file is a text file by its name, of which there may be many."""
    return not (name.lower().endswith(TEXTS) or is_system_file(name))


def _require_no_image(path: Path) -> bool:
    """Return False if a file with another suffix is no image; else raise a UserError."""
    with opened(str(path), path) as file:
        head = file.read(16)
    if head.startswith(MAGIC) or head[8:12] in BRANDS:
        raise UserError(
            f"{path} is an image, but its name does not end in one of {', '.join(SUFFIXES)}: "
            "rename, convert or move the file"
        )
    return False


@contextmanager
def _image(path: Path, before: Identity) -> Iterator[Any]:
    """Open a Pillow image, not yet decoded; errors until it is closed name the path.

    Raises:
        UserError: the file is no readable image, or has changed since its folder was listed.
    """
    pillow = import_module("PIL.Image")
    with reopened(str(path), path, before) as file:
        try:
            with pillow.open(file, formats=DECODERS) as image:
                most = pillow.MAX_IMAGE_PIXELS
                if most is not None and image.width * image.height > most:
                    raise UserError(
                        f"{path} has {image.height} x {image.width} pixels: must be at most "
                        f"PIL.Image.MAX_IMAGE_PIXELS={most}"
                    )
                if image.mode not in MODES:
                    raise UserError(
                        f"{path} has pixels of mode {image.mode!r}: must have 8 bits a colour"
                    )
                yield image
        except UserError:
            raise
        except Exception as error:  # Pillow raises any exception for a damaged file
            raise UserError(f"{path} is not a readable image: {line_of(error)}") from None


def _checked_size(size: Sequence[int]) -> tuple[int, int]:
    if isinstance(size, str) or not isinstance(size, Sequence) or len(size) != 2:
        raise UserError(f"size={shown(size)} must be two whole numbers, (height, width)")
    return integer("size[0]", size[0], 1, MOST_PIXELS), integer("size[1]", size[1], 1, MOST_PIXELS)


def _require_pillow() -> None:
    try:
        import_module("PIL.Image")
    except ImportError as error:
        raise UserError(
            f"images need Pillow, which cannot be imported ({error}): "
            "pip install '.[images]' from the checkout"
        ) from None
