"""The rows behind `jsonl:PATH`, `hub:OWNER/NAME` and the like, wherever they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from training.utils.base.user_files import named_object
from training.utils.data.files.addresses import check_address, content_of_files, folder_of, share_files
from training.utils.data.files.listing import PassedOver
from training.utils.data.files.readers import STORES, Rows, files_of, open_rows, split_reader

if TYPE_CHECKING:
    from training.utils.data.files.columns import Expected


class RowStore(Protocol):
    """A plugin's training rows, and evaluation rows where there are any; the constructor takes an address and the flag
    that gave it.

    address: for errors.
    folder: that relative paths in the rows begin at; None of rows that are not stored here.
    notes: sentences on what is passed over.
    """

    address: str
    folder: str | None
    notes: Sequence[str]

    @classmethod
    def check(cls, address: str, flag: str, *, reach: bool = False) -> None:
        """Raise ThreestepError if an address cannot be right, and with `reach` if its rows are out of reach."""

    def fingerprint(self) -> str:
        """A string that changes whenever a row may change."""

    def open(self, expected: Expected | None = None) -> tuple[Rows, Rows | None]:
        """The training rows and the evaluation rows; ThreestepError where one is not as `expected`."""


class StoredFiles:
    """The same of files here or behind addresses such as s3://, which the constructor lists."""

    def __init__(self, reader: str, address: str, flag: str, *, spool_dir: str | None, hold_out: bool) -> None:
        self.address = address
        self.folder = folder_of(address)
        self._reader = reader
        self._spool_dir = spool_dir
        passed = PassedOver()
        files = files_of(reader, address, flag, passed)
        self.notes = passed.sentences
        self._shares = share_files(files) if hold_out else (files, [])

    def fingerprint(self) -> str:
        return " ".join(content_of_files(files, self._spool_dir) for files in self._shares)

    def open(self, expected: Expected | None = None) -> tuple[Rows, Rows | None]:
        train, held_out = self._shares
        opened = open_rows(self._reader, train, self._spool_dir, expected)
        return opened, open_rows(self._reader, held_out, self._spool_dir, expected) if held_out else None


def stored_rows(name: str, flag: str, spool_dir: str | None, hold_out: bool = True) -> RowStore | StoredFiles | None:
    """The rows at the address `name`; None if it names no reader.

    flag: gave the name, for errors. spool_dir: for copies of files that have no random access. hold_out: files named
    for evaluation are no training rows.
    """
    split = split_reader(name)
    if split is None:
        return None
    reader, address = split
    if reader in STORES:
        return named_object(STORES[reader])(address, flag)  # type: ignore[no-any-return]
    return StoredFiles(reader, address, flag, spool_dir=spool_dir, hold_out=hold_out)


def check_stored(reader: str, address: str, flag: str, *, reach: bool = False) -> None:
    """Raise ThreestepError if an address cannot be right; uses no network. reach: asks a plugin's store, too."""
    if reader in STORES:
        named_object(STORES[reader]).check(address, flag, reach=reach)
    else:
        check_address(address, flag)
