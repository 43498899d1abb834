"""What a path holds, found by looking at it, and the reader that takes it."""

import zipfile
from pathlib import Path

from protofed.data.readers.files import (
    BROKEN_NPZ,
    Found,
    idx_files,
    is_image,
    read_idx,
    read_images,
    read_npz,
    subfolders,
)


def kind_of(path: Path) -> str:
    """'npz', 'ids' (a side table), 'idx', 'images', 'hub' (Hugging Face's save_to_disk), 'pfllib', 'leaf' and 'sd19'
    (folders as these make them), or '' for anything else."""
    try:
        if path.is_file():
            return _kind_of_file(path) if path.suffix == ".npz" else ""
        if not path.is_dir():
            return ""
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return "hub"
        if idx_files(path):
            return "idx"
        top = subfolders(path)
        if "train" in top and "test" in top and any(top["train"].glob("[0-9]*.npz")):
            return "pfllib"
        inner = subfolders(top["train"]) if "train" in top else top
        if any(is_image(image) for folder in inner.values() for image in folder.iterdir()):
            return "images"
        from protofed.data.readers.folders import folder_kind  # a client in the field hardly has one

        return folder_kind(path)
    except OSError:  # no permission to look, or a name too long to be a path
        return ""


def _kind_of_file(path: Path) -> str:
    """Only the archive's table of contents is read. A damaged one counts as data, so that reading it says so."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except BROKEN_NPZ:
        return "npz"
    tables = [name for name in names if name.endswith("_train.npy")]
    return "ids" if tables and not {"x_train.npy", "y_train.npy"} & set(names) else "npz"


def read_arrays(path: Path, size: int) -> Found:
    """The arrays of a file or folder; `size` is used only for images that differ in size."""
    kind = kind_of(path)
    if kind == "idx":
        return read_idx(path)
    if kind == "images":
        return read_images(path, size)
    if kind in ("leaf", "sd19"):
        from protofed.data.readers.folders import read_folder

        return read_folder(path, size)
    return read_npz(path)
