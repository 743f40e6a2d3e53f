"""Random answers to `cp`, and random trees: nothing appears but files and directories, and those only if complete.

PROVISIONER_FUZZ_SECONDS sets how long each test runs, see fuzzing.py.
"""

from __future__ import annotations

import io
import stat
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from provisioner.base.errors import TaskError
from provisioner.copying import transfer
from provisioner.copying.copy_program import (
    DIRECTORY,
    END,
    FILE,
    PIECE,
    PROGRAM,
    SKIPPED,
    UP,
    TreeSender,
    is_plain_name,
)
from provisioner.ssh.exec_frames import frame
from tests.attacks.fuzzing import damaged, fuzz
from tests.unit.fakes.copies import HostileMachine, directory, file, pieces, tree

VALID = (
    tree(file(b"a"), directory(b"b", frame(SKIPPED, b"c"), file(b"d", b"", PROGRAM)), file(b"e", b"x" * 70_000)),
    tree(directory(b"a", directory(b"a", directory(b"a"))), directory(b"b")),
    file(b"") + frame(END),
)
NAMES = st.sampled_from((b"", b"a", b"b", b"..", b".", b"/", b"../a", b"a/b", b"\0", b"\xff", b"x" * 255, b"x" * 256))
FRAMES = st.builds(
    frame,
    st.sampled_from((DIRECTORY, UP, FILE, PROGRAM, PIECE, SKIPPED, END, b"l")),
    st.just(b"") | NAMES | st.binary(max_size=40),
)
STREAMS = damaged(*VALID) | st.lists(FRAMES, max_size=30).map(b"".join) | st.binary(max_size=400)

PLAIN = st.text(min_size=1, max_size=20).filter(lambda name: _is_encodable(name) and is_plain_name(name.encode()))
CONTENTS = st.binary(max_size=40) | st.sampled_from((b"x" * 65534, b"x" * 65535, b"x" * 65536, b"x" * 131070))
TREES: st.SearchStrategy[Any] = st.recursive(
    CONTENTS, lambda inner: st.dictionaries(PLAIN, inner, max_size=4), max_leaves=10
)


def _is_encodable(name: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in name)


def test_a_machine_may_answer_anything() -> None:
    def check(answer: tuple[bytes, int]) -> None:
        stream, size = answer
        with tempfile.TemporaryDirectory() as top:
            inside = Path(top) / "inside"
            inside.mkdir()
            machine = HostileMachine(pieces(stream, size))
            refusal, downloaded = "", None
            try:
                downloaded = transfer.download(machine.connection, "wanted", inside / "copy")
            except TaskError as error:
                refusal = error.message
            assert refusal.isprintable()
            assert [path.name for path in inside.iterdir()] == (["copy"] if downloaded else [])
            if downloaded:
                kinds = [stat.S_IFMT(path.lstat().st_mode) for path in (inside / "copy", *inside.rglob("*"))]
                assert set(kinds) <= {stat.S_IFREG, stat.S_IFDIR}
                assert downloaded.files == sum(path.is_file() for path in inside.rglob("*"))
                assert all(path.isprintable() for path in downloaded.skipped)
            assert [path.name for path in Path(top).iterdir()] == ["inside"]

    fuzz(st.tuples(STREAMS, st.sampled_from((1, 7, 4096))), check)


def test_every_tree_arrives_as_it_was() -> None:
    def check(wanted: Any) -> None:
        with tempfile.TemporaryDirectory() as top:
            write(Path(top) / "sent", wanted)
            out = io.BytesIO()
            TreeSender(out).send(f"{top}/sent")
            transfer.download(HostileMachine(pieces(out.getvalue())).connection, "sent", Path(top) / "copy")
            assert read(Path(top) / "copy") == wanted

    fuzz(TREES, check)


def write(path: Path, wanted: Any) -> None:
    if isinstance(wanted, bytes):
        path.write_bytes(wanted)
        return
    path.mkdir()
    for name, inner in wanted.items():
        write(path / name, inner)


def read(path: Path) -> Any:
    return path.read_bytes() if path.is_file() else {entry.name: read(entry) for entry in path.iterdir()}
