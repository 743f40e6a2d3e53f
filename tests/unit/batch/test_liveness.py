"""A worker that cannot show that it is alive must not work. tests/batch/test_postgres.py shows what locks tell."""

from __future__ import annotations

import pytest

from provisioner.base.errors import LivenessLostError
from provisioner.batch.liveness import LivenessLock


def test_an_unreachable_database_is_a_lost_connection() -> None:
    with pytest.raises(LivenessLostError, match="cannot be reached") as error:
        LivenessLock("postgresql://nobody:secret@127.0.0.1:1/nothing", "worker")
    assert "secret" not in error.value.message
