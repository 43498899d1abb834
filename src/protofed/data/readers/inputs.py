"""Unlabelled samples to classify: .npy, .npz, images and folders of images."""

from pathlib import Path

import numpy as np
from PIL import Image

from protofed.data.readers.files import BROKEN_IMAGE, BROKEN_NPZ, IMAGES, check_unpacked
from protofed.errors import UserError, first_line

KEYS = ("x", "inputs", "x_test", "x_train")  # keys of an .npz; the first one present is used


def read_inputs(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, list[str]]:
    """Raw samples (N, *shape) with a name for each: its row or its file."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
        if not files:
            raise UserError(f"{path} holds no images. Give images, an .npy or an .npz.")
        return np.stack([_image(file, shape) for file in files]), [str(file.relative_to(path)) for file in files]
    if path.suffix.lower() in IMAGES:
        return _image(path, shape)[None], [path.name]
    x = _shaped(_array(path), shape)
    return x, [str(row) for row in range(len(x))]


def _array(path: Path) -> np.ndarray:
    if path.suffix not in (".npy", ".npz"):
        raise UserError(
            f"{path} is not a kind of file that predict reads. Give an .npy, an .npz, an image or a folder of images."
        )
    check_unpacked(path)
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            return stored
        with stored:
            names = [key for key in KEYS if key in stored.files] or (stored.files if len(stored.files) == 1 else [])
            if names:
                return np.asarray(stored[names[0]])
            raise UserError(f"{path} has the arrays {', '.join(stored.files)}. Call the samples x.")
    except FileNotFoundError:
        raise UserError(f"there is no {path}.") from None
    except BROKEN_NPZ as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}). Copy or save it again.") from None


def _shaped(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """One sample as a batch; images (N, H, W) and (N, H, W, C) as (N, C, H, W)."""
    if len(shape) == 3:
        single = x.shape in (shape, shape[1:], (*shape[1:], shape[0]))
        x = x[None] if single else x
        if x.ndim == 3 and shape[0] == 1:
            x = x[:, None]
        if x.ndim == 4 and x.shape[1:] != shape and x.shape[3] == shape[0]:
            x = x.transpose(0, 3, 1, 2)
    return x[None] if x.shape == shape else x


def _image(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 (C, H, W), resized and converted to grey or colour as the model needs."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise UserError(f"{path} is an image, but the model takes samples of shape {shape}. Give an .npy.")
    try:
        with Image.open(path) as image:
            small = image.convert("L" if shape[0] == 1 else "RGB").resize(shape[:0:-1], Image.Resampling.BILINEAR)
            pixels = np.asarray(small)
    except FileNotFoundError:
        raise UserError(f"there is no {path}.") from None
    except BROKEN_IMAGE as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}). Replace it.") from None
    return pixels[None] if shape[0] == 1 else pixels.transpose(2, 0, 1)
