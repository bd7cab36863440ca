"""Rewrite a .tar.gz so that its bytes depend on its files alone: python scripts/plain_archive.py ARCHIVE

Members are sorted by name and belong to user 0; their time is SOURCE_DATE_EPOCH (seconds); files have mode 644, or 755
if they can be executed. The gzip header has neither a name nor a time.
"""

from __future__ import annotations

import gzip
import io
import os
import sys
import tarfile
from pathlib import Path


def plain(archive: bytes, epoch: int) -> bytes:
    """The archive in its plain form."""
    packed, unpacked = io.BytesIO(), io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as read,
        tarfile.open(fileobj=unpacked, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in sorted(read.getmembers(), key=lambda each: each.name):
            plain_member = tarfile.TarInfo(member.name)
            plain_member.type, plain_member.size, plain_member.mtime = member.type, member.size, epoch
            plain_member.linkname = member.linkname
            plain_member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            written.addfile(plain_member, read.extractfile(member) if member.isreg() else None)
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0, compresslevel=9) as file:
        file.write(unpacked.getvalue())
    return packed.getvalue()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_bytes(plain(path.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))
