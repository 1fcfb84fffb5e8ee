"""Where the journal of a sweep is: in its directory, or in a database that machines without a common folder share."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.config import Refusal
from toolkit.config.json_and_yaml import kind_of_file
from toolkit.config.places import place_to_write
from toolkit.sweeps.journal import JOURNAL, Journal, JournalFile
from toolkit.sweeps.workers import Liveness
from toolkit.system.console import as_typed, first_line
from toolkit.system.files import make_folder, write_atomically
from toolkit.system.json_lines import json_line, parse_object

STORAGE = "storage.json"
_TABLES = ("toolkit_sweeps", "toolkit_sweep_records", "toolkit_sweep_beats")
_LOCK_SECONDS = 60
_TABLES_ATTEMPTS = 10


def open_journal(folder: Path, url: str | None = None, must_exist: bool = False) -> Journal:
    """The journal of a sweep's directory; with a URL, then or when the directory was made, that in a database.

    Raises:
        Refusal: the database cannot be used, or `must_exist` and there is no sweep.
    """
    known, name = _known(folder)
    if url is None and known == "":
        raise Refusal(f"{folder / STORAGE}: names no database. Give it once more: --storage URL.")
    if url is None and "***" in (known or ""):
        raise Refusal(f"{folder}: its journal is in {known}. Give the URL with its password: --storage URL.")
    file = folder / JOURNAL
    if file.exists() and not file.is_file():
        raise Refusal(f"{file}: is {kind_of_file(file.stat().st_mode)}, and must be a file. Take another --sweep-dir.")
    if url is None and known is None:
        if must_exist and not file.exists():
            raise Refusal(f"{folder}: is no directory of a sweep; it has no {JOURNAL}.")
        return JournalFile(folder if must_exist else place_to_write(folder, "--sweep-dir"))
    if file.exists():
        raise Refusal(f"--storage {url}: {folder} holds a sweep with its journal in {JOURNAL}. Take another --sweep-dir.")
    name = name or folder.absolute().name
    journal = JournalDatabase(url or str(known), name)
    if not must_exist:
        make_folder(place_to_write(folder, "--sweep-dir"))
        with journal.exclusive():  # workers that begin at once would write over each other's temporary file
            write_atomically(folder / STORAGE, json.dumps({"url": journal.shown_url, "name": name}) + "\n")
    return journal


def _known(folder: Path) -> tuple[str | None, str | None]:
    """The database that a sweep's directory names ("" where that cannot be read), and the sweep's name in it, which stays when
    the directory is moved."""
    try:
        record = parse_object((folder / STORAGE).read_text(encoding="utf-8"))
    except OSError:
        return None, None
    url, name = (record.get("url"), record.get("name")) if record else (None, None)
    return url if isinstance(url, str) else "", name if isinstance(name, str) else None


class JournalDatabase:
    """Records in a table, in the order of their numbers; the row of the sweep is the lock, so no process leaves one behind.

    Args:
        url: as SQLAlchemy takes it, such as sqlite:///sweeps.db or postgresql://host/name.
        name: of the sweep; workers that share it have directories of the same name.
    """

    def __init__(self, url: str, name: str) -> None:
        try:
            import sqlalchemy as sql
        except ImportError:
            raise Refusal("--storage: needs SQLAlchemy, which is not installed. Type pip install sqlalchemy.") from None
        self._sql, self._name = sql, name
        try:
            parsed = sql.make_url(url)
            if parsed.get_backend_name() == "sqlite":
                if parsed.database in (None, "", ":memory:"):
                    raise Refusal(f"--storage {url}: is in memory, and gone with this process. Write sqlite:///sweeps.db.")
                file = Path(str(parsed.database)).absolute()  # the sweep may be continued from another folder
                if not (place := file.parent).is_dir():
                    raise Refusal(f"--storage {url}: there is no folder {place}. Type {as_typed('mkdir', '-p', place)}")
                parsed = parsed.set(database=str(file))
            waits = {"timeout": _LOCK_SECONDS} if parsed.get_backend_name() == "sqlite" else {}
            self._engine = sql.create_engine(parsed, connect_args=waits)
            self.shown_url = parsed.render_as_string(hide_password=True)
            self._prepare()
        except ImportError as error:
            package = {"psycopg": "'psycopg[binary]'", "MySQLdb": "mysqlclient"}.get(error.name or "", error.name)
            raise Refusal(f"--storage {url.split('@')[-1]}: its driver is not installed. Type pip install {package}.") from None
        except sql.exc.SQLAlchemyError as error:
            why = first_line(getattr(error, "orig", None) or error)
            raise Refusal(f"--storage {url.split('@')[-1]}: {why}") from None
        self._connection: Any = None

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        sweeps = self._sweeps
        with _as_os_error(self._sql), self._engine.begin() as connection:
            # An update takes the lock in every database: of this row, or of the whole of SQLite's file.
            connection.execute(self._sql.update(sweeps).where(sweeps.c.name == self._name).values(turns=sweeps.c.turns + 1))
            self._connection = connection
            try:
                yield
            finally:
                self._connection = None

    def records(self, since: int) -> Sequence[Mapping[str, Any]]:
        """Those from a number on."""
        table = self._records
        wanted = self._sql.select(table.c.line).where(table.c.sweep == self._name, table.c.number >= since)
        wanted = wanted.order_by(table.c.number)
        with _as_os_error(self._sql):
            if self._connection is not None:
                rows = self._connection.execute(wanted).scalars().all()
            else:
                with self._engine.connect() as connection:
                    rows = connection.execute(wanted).scalars().all()
        found = [parse_object(str(row)) for row in rows]
        if any(each is None for each in found):
            raise Refusal(f"--storage {self.shown_url}: record {since + found.index(None)} of {self._name} is none of a sweep.")
        return [each for each in found if each is not None]

    def append(self, record: Mapping[str, Any]) -> None:
        table, sql = self._records, self._sql
        count = sql.select(sql.func.count()).select_from(table).where(table.c.sweep == self._name).scalar_subquery()
        with _as_os_error(sql):
            self._connection.execute(sql.insert(table).values(sweep=self._name, number=count, line=json_line(dict(record))))

    def liveness(self) -> Liveness:
        """Of workers by their rows of a table."""
        table, sql = self._beats, self._sql

        def read(worker: str) -> str | None:
            connection = self._connection
            wanted = sql.select(table.c.beat).where(table.c.worker == worker)
            if connection is not None:
                return connection.execute(wanted).scalar()
            with self._engine.connect() as own:
                return own.execute(wanted).scalar()

        def write(worker: str, beat: str) -> None:
            with _as_os_error(sql), self._engine.begin() as connection:
                if not connection.execute(sql.update(table).where(table.c.worker == worker).values(beat=beat)).rowcount:
                    connection.execute(sql.insert(table).values(worker=worker, beat=beat))

        return Liveness(read, write)

    def _prepare(self) -> None:
        sql, meta = self._sql, self._sql.MetaData()
        text, key = sql.Text(), sql.String(200)
        self._sweeps = sql.Table(_TABLES[0], meta, sql.Column("name", key, primary_key=True), sql.Column("turns", sql.Integer))
        self._records = sql.Table(
            _TABLES[1], meta, sql.Column("sweep", key, primary_key=True),
            sql.Column("number", sql.Integer, primary_key=True, autoincrement=False), sql.Column("line", text),
        )  # fmt: skip
        self._beats = sql.Table(_TABLES[2], meta, sql.Column("worker", key, primary_key=True), sql.Column("beat", text))
        found = sql.inspect(self._engine)
        tables = set(found.get_table_names())
        if tables and not tables & set(_TABLES):
            raise Refusal(
                f"--storage {self.shown_url}: holds {', '.join(sorted(tables)[:3])}, and no sweeps of this toolkit. Name a "
                "database of its own."
            )
        for table in (self._sweeps, self._records, self._beats):
            columns = {each["name"] for each in found.get_columns(table.name)} if table.name in tables else set()
            if columns and columns != {each.name for each in table.columns}:
                raise Refusal(f"--storage {self.shown_url}: its table {table.name} is none of this toolkit's.")
        for attempt in range(_TABLES_ATTEMPTS):
            try:
                meta.create_all(self._engine)
                break
            except (sql.exc.IntegrityError, sql.exc.OperationalError, sql.exc.ProgrammingError):
                # Another process makes them at this moment: each database has an error of its own for it, and SQLite shows the
                # first table before the last one is there.
                if attempt + 1 == _TABLES_ATTEMPTS:
                    raise
                time.sleep(0.2)
        with contextlib.suppress(sql.exc.IntegrityError), self._engine.begin() as connection:
            connection.execute(sql.insert(self._sweeps).values(name=self._name, turns=0))


@contextlib.contextmanager
def _as_os_error(sql: Any) -> Iterator[None]:
    """What a database cannot do, such as write to a full disk, is an error of the system."""
    try:
        yield
    except sql.exc.SQLAlchemyError as error:
        raise OSError(first_line(getattr(error, "orig", None) or error)) from error
