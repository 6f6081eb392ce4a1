"""A damaged GGUF file gives a ModelLoadError that names it, whatever the damage."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.gguf_file import GgufFile
from statewise.runtime.models.inspection import inspect_model
from statewise.runtime.models.locate import locate_model
from statewise.runtime.models.tiny import TinySize
from statewise.runtime.tokenizer.load import load_tokenizer
from support.tiny import load_tiny, tiny_model, write_gguf

SMALL = TinySize(layers=1, hidden=32, intermediate=32, heads=2, kv_heads=1)


def small_gguf(target: Path) -> Path:
    return write_gguf(tiny_model("llama", SMALL), target / "model.gguf")


def header_size(file: Path) -> int:
    return min(t.start for t in GgufFile(file).tensors.values())


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_bytes(entries: bytes, num_entries: int, infos: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + entries + infos


def open_error(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        GgufFile(file)
    assert str(file) in str(caught.value)
    return str(caught.value)


def test_values_of_every_type(tmp_path: Path) -> None:
    scalars = [(0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -9), (4, "I", 1 << 31)]
    scalars += [(5, "i", -5), (6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 60), (11, "q", -1)]
    scalars += [(12, "d", 0.1)]
    entries = b"".join(
        string(f"k{t}") + struct.pack("<I", t) + struct.pack("<" + f, v) for t, f, v in scalars
    )
    entries += string("s") + struct.pack("<I", 8) + string("héllo")
    entries += string("ints") + struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)
    entries += string("strings") + struct.pack("<IIQ", 9, 8, 2) + string("a") + string("")
    file = tmp_path / "v.gguf"
    file.write_bytes(gguf_bytes(entries, len(scalars) + 3))
    opened = GgufFile(file)
    assert {k: opened.get(k) for k, _, _ in ((f"k{t}", f, v) for t, f, v in scalars)} == {
        f"k{t}": v for t, _, v in scalars
    }
    assert opened.get("s") == "héllo"
    assert opened.get("ints").tolist() == [1, -2, 3]
    assert opened.get("strings") == ["a", ""]
    assert opened.get("absent", 7) == 7
    assert "ints" in opened
    assert len(opened.keys()) == len(scalars) + 3


@pytest.mark.slow
def test_truncation_anywhere_in_the_header_is_an_error(tmp_path: Path) -> None:
    data = small_gguf(tmp_path).read_bytes()
    end = header_size(tmp_path / "model.gguf")
    for kept in [*range(200), *range(200, end, 149)]:
        assert "truncated" in open_error(tmp_path / "cut.gguf", data[:kept])


def test_truncated_data_names_the_tensor(tmp_path: Path) -> None:
    data = small_gguf(tmp_path).read_bytes()
    message = open_error(tmp_path / "cut.gguf", data[:-1])
    assert "tensor '" in message
    assert "truncated" in message


@pytest.mark.slow
def test_any_flipped_header_byte_loads_or_is_a_load_error(tmp_path: Path) -> None:
    file = small_gguf(tmp_path)
    data, end = file.read_bytes(), header_size(file)
    rng = np.random.default_rng(0)
    outcomes = set()
    for at in rng.integers(0, end, 120).tolist():
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        file.write_bytes(damaged)
        try:
            load_tiny(file)
            load_tokenizer(file)
            outcomes.add("loaded")
        except ModelLoadError as error:
            outcomes.add("refused" if str(file) in str(error) else f"nameless: {error}")
    assert outcomes == {"loaded", "refused"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
        (gguf_bytes(b"", 1 << 50), "truncated or corrupt"),
        (gguf_bytes(string("a") + struct.pack("<II", 4, 1), 1) * 1, ""),
        (gguf_bytes((string("a") + struct.pack("<II", 4, 1)) * 2, 2), "'a' occurs twice"),
        (gguf_bytes(string("a") + struct.pack("<I", 13) + bytes(8), 1), "value type 13"),
        (gguf_bytes(string("a") + struct.pack("<IIQ", 9, 9, 0), 1), "value type 9"),
        (gguf_bytes(string("a") + struct.pack("<IIQ", 9, 8, 1 << 40), 1), "truncated"),
        (
            gguf_bytes(b"", 0, string("w") + struct.pack("<IQIQ", 1, 32, 99, 0), 1),
            "storage type 99 is not supported",
        ),
        (
            gguf_bytes(b"", 0, string("w") + struct.pack("<IQIQ", 1, 33, 8, 0), 1),
            "not in whole Q8_0 blocks",
        ),
        (gguf_bytes(b"", 0, string("w") + struct.pack("<I", 9) + bytes(90), 1), "9 dimensions"),
    ],
)
def test_foreign_content(data: bytes, message: str, tmp_path: Path) -> None:
    file = tmp_path / "f.gguf"
    if not message:  # the well-formed relative of the cases after it
        file.write_bytes(data)
        assert GgufFile(file).get("a") == 1
        return
    assert message in open_error(file, data)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    import gguf

    def written(arch: str, **entries: int) -> Path:
        file = tmp_path / "x.gguf"
        writer = gguf.GGUFWriter(file, arch)
        for key, value in entries.items():
            writer.add_uint32(key.replace("__", "."), value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return file

    with pytest.raises(ModelLoadError, match="architecture 'mamba' is not supported; known"):
        inspect_model(written("mamba"))
    with pytest.raises(ModelLoadError, match=r"metadata 'llama\.attention\.head_count' is missing"):
        inspect_model(written("llama"))
    with pytest.raises(ModelLoadError, match="one part of a split model"):
        inspect_model(written("llama", split__count=2))
    with pytest.raises(ModelLoadError, match="no tokenizer in the metadata"):
        load_tokenizer(written("llama"))


def test_directory_with_one_gguf_file(tmp_path: Path) -> None:
    file = small_gguf(tmp_path)
    assert locate_model(tmp_path).path == file
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files: name one"):
        locate_model(tmp_path)
