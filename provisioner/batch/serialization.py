"""Makes dbos read and write the queue's rows as bounded JSON only, whatever a row says about itself.

dbos obeys a row's own column `serialization`, which may name pickle: so any user that can write to the database could
run code in each process that reads it. Importing this module replaces dbos's ways of reading, for the whole process. No
pickle is ever read or written.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from dbos import DBOSPortableJSONSerializer, _dbos, _queue, _serialization, _sys_db
from dbos._error import DBOSException

from provisioner.base import strict_json

REFUSED = "The queue's row of this run is not one that provisioner wrote: another user of the database changed it."

_JSON = DBOSPortableJSONSerializer()
_execute = vars(_queue)["execute_dequeued_workflow"]


class RefusedRowError(ValueError):
    """Raised for a row that is not bounded JSON."""

    def __init__(self) -> None:
        super().__init__(REFUSED)


def serializer() -> DBOSPortableJSONSerializer:
    """Returns the serializer to open the engine and its clients with."""
    return _JSON


def _refuse(_self: object, _data: object) -> Any:
    raise RefusedRowError


def _read_json(_self: object, text: str | None) -> Any:
    """Reads a row's JSON.

    Raises:
        RefusedRowError: it is not strict JSON, or too large.
    """
    if text is None:
        return None
    try:
        return strict_json.parse(text.encode())
    except (AttributeError, ValueError) as error:  # AttributeError: no text at all
        raise RefusedRowError from error


def read_unused_json(text: str | bytes) -> Any:
    """Reads the JSON of a column that provisioner does not use; returns None for what is no bounded JSON.

    dbos reads such columns of all rows at once. An error would hide every run of the batch.
    """
    try:
        return _read_json(None, text.decode() if isinstance(text, bytes) else text)
    except ValueError:
        return None


def _execute_or_end(dbos: Any, status: Any, owner_xid: str) -> Any:
    """Starts a run that this process has taken from the queue; ends it as failed if its row cannot be used.

    dbos itself would leave most such rows assigned to this process forever, where they count as running.
    """
    try:
        return _execute(dbos, status, owner_xid)
    except (DBOSException, ValueError, TypeError, KeyError, AttributeError) as error:
        message = _JSON.serialize(_serialization.exception_to_workflow_error_data(error))
        dbos._sys_db.update_workflow_outcome(status["workflow_uuid"], "ERROR", error=message, owner_xid=owner_xid)
        raise


def _run_no_schedules(*_: object) -> None:
    """Ends dbos's thread for schedules at once: provisioner has none, and a row must not start any."""


def _replace() -> None:
    """Replaces what dbos reads and writes rows with. The attack tests fail if a version of dbos has another way."""
    vars(_serialization).pop("pickle", None)
    vars(_sys_db)["json"] = SimpleNamespace(loads=read_unused_json, dumps=json.dumps)
    for name in ("serialize", "deserialize"):
        setattr(_serialization.DefaultSerializer, name, _refuse)
    setattr(DBOSPortableJSONSerializer, "deserialize", _read_json)  # noqa: B010 - mypy refuses the assignment
    setattr(_queue, "execute_dequeued_workflow", _execute_or_end)  # noqa: B010
    setattr(_dbos, "dynamic_scheduler_loop", _run_no_schedules)  # noqa: B010


_replace()
