"""Serves moto's API, refuses what the printed policy does not allow, and makes chosen requests fail as AWS does.

Tests that look around in the account do so with a key of their own, INSPECTOR, whose calls are not judged.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

from provisioner.clouds.aws.policy import policy
from tests.aws.moto_gaps import close_gaps, take_time
from tests.aws.rights import calls
from tests.aws.rights.evaluator import allowed
from tests.aws.rights.requests import requests
from tests.aws.rights.world import MotoWorld

INSPECTOR = "inspector"
# Where the tests that keep Terraform's state in S3 keep it.
STATE = "s3://provisioner-tests-state/team"
Request = dict[str, str]
ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{code}</Code>'
    "<Message>injected by the tests</Message></Error></Errors><RequestID>fault</RequestID></Response>"
)


@dataclass
class Fault:
    """Fails requests of one action while `when` says so.

    Args:
        action: EC2's name, such as RunInstances; or an HTTP method and the end of a path, `PUT .tfstate`.
        times: how often at most.
        region: only there; empty: everywhere.
        done: the request is obeyed, and only its answer is replaced.
    """

    action: str
    code: str
    status: str = "400 Bad Request"
    times: int = 1000
    region: str = ""
    when: Callable[[Request], bool] = lambda _: True
    done: bool = False
    hits: list[Request] = field(default_factory=list)


class FaultyApi:
    """The API as a WSGI application.

    Attributes:
        faults: what is injected.
        requests: what came.
        allowed: the actions for which the policy was asked, and which it allowed.
        refused: what it did not allow; not even attempted.
    """

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.allowed: set[str] = set()
        self.refused: list[str] = []
        self._policy = policy(STATE)
        self._lock = threading.Lock()
        # moto's backends are not made for threads: a request may fail half done, and is then repeated.
        self._one_at_a_time = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        take_time()
        environ["wsgi.input"] = io.BytesIO(body)
        answered: list[str] = []

        def noted(status: str, *rest: Any) -> Any:
            answered.append(status)
            return start_response(status, *rest)

        call = calls.read(environ, body)
        region = call.region if call else ""
        if call and call.key != INSPECTOR and (refusal := self._refusal(call)):
            self.refused.append(refusal)
            answer = ERROR.format(code="UnauthorizedOperation").encode()
            start_response("403 Forbidden", [("Content-Type", "text/xml"), ("Content-Length", str(len(answer)))])
            return [answer]
        if fault := self._fault(environ["REQUEST_METHOD"], environ["PATH_INFO"], body, region):
            if fault.done:
                with self._one_at_a_time:
                    for _ in self._moto(environ, lambda *_: None):
                        pass
            answer = ERROR.format(code=fault.code).encode()
            start_response(fault.status, [("Content-Type", "text/xml"), ("Content-Length", str(len(answer)))])
            return [answer]
        if "/pricing/" in environ.get("HTTP_AUTHORIZATION", ""):  # moto does not have it, and says so at length
            start_response("501 Not Implemented", [("Content-Length", "0")])
            return []
        with self._one_at_a_time:
            chunks = list(self._moto(environ, noted))
        if answered and answered[0].startswith("5"):  # shown with a test that fails
            excerpt = b"".join(chunks)[:2000]
            print(f"moto failed: {body[:300]!r}: {answered[0]}: {excerpt!r}", file=sys.stderr)
        return chunks

    def _refusal(self, call: calls.Call) -> str:
        """What the policy says to a call; empty if it allows it."""
        with self._one_at_a_time:
            asked = list(requests(call, MotoWorld()))
        for request in asked:
            if not allowed(self._policy, request):
                return f"{call}: {request}"
        self.allowed |= {request.action for request in asked}
        return ""

    def inject(self, fault: Fault) -> Fault:
        """Adds a fault."""
        self.faults.append(fault)
        return fault

    def _fault(self, method: str, path: str, body: bytes, region: str) -> Fault | None:
        request = dict(urllib.parse.parse_qsl(body.decode("latin-1"))) if body.startswith(b"Action=") else {}
        self.requests.append(request or {"Action": f"{method} {path}"})
        for fault in self.faults:
            action, _, end = fault.action.partition(" ")
            matches = request.get("Action") == action or (method == action and end and path.endswith(end))
            if matches and fault.region in ("", region) and fault.when(request):  # which may ask the API itself
                with self._lock:
                    if len(fault.hits) < fault.times:
                        fault.hits.append(request)
                        return fault
        return None


@contextmanager
def serving() -> Iterator[FaultyApi]:
    """The API, listening on a port of the loopback."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    close_gaps()
    api = FaultyApi()
    server = make_server("127.0.0.1", 0, api, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    yield api
    server.shutdown()
    thread.join()
    server.server_close()
