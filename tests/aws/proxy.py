"""Serves moto's API, refuses what the printed policy or S3 does not allow, and makes chosen requests fail as on AWS."""

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

from tests.aws import bucket_regions
from tests.aws.moto_gaps import close_gaps, take_time
from tests.aws.rights import calls
from tests.aws.rights.judge import Judge, administer, refusal
from tests.aws.throttling import Throttle

Request = dict[str, str]
ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Response><Errors><Error><Code>{code}</Code>'
    "<Message>{message}</Message></Error></Errors><RequestID>fault</RequestID></Response>"
)


@dataclass
class Fault:
    """Fails requests of one action while `when` says so.

    Args:
        action: EC2's name, such as RunInstances; or an HTTP method and the end of a path, `PUT .tfstate`.
        times: how often at most.
        region: only there; empty: everywhere.
        done: the request is obeyed, and only its answer is replaced.
        message: what the error says besides its code.
    """

    action: str
    code: str
    status: str = "400 Bad Request"
    times: int = 1000
    region: str = ""
    when: Callable[[Request], bool] = lambda _: True
    done: bool = False
    message: str = "injected by the tests"
    hits: list[Request] = field(default_factory=list)


class FaultyApi:
    """The API as a WSGI application.

    Attributes:
        faults: what is injected.
        requests: what came.
        tokens: who asked (its User-Agent) with which session token, or an empty text.
        judge: refuses what the policy does not allow.
        throttle: refuses what is too much.
    """

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens: list[tuple[str, str]] = []
        self.judge = Judge()
        self.throttle = Throttle()
        self._lock = threading.Lock()
        # moto's backends are not made for threads: a request may fail half done, and is then repeated.
        self._one_at_a_time = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        take_time()
        environ["wsgi.input"] = io.BytesIO(body)
        answered: list[str] = []
        self.tokens.append((environ.get("HTTP_USER_AGENT", ""), environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")))

        def noted(status: str, *rest: Any) -> Any:
            answered.append(status)
            return start_response(status, *rest)

        with self._one_at_a_time:
            refused = self.judge.refuses(environ, body)
        if refused:
            return refusal(start_response)
        call = calls.read(environ, body)
        if elsewhere := self._refused_by_service(call, environ["REQUEST_METHOD"], start_response):
            return elsewhere
        region = call.region if call else ""
        if fault := self._fault(environ["REQUEST_METHOD"], environ["PATH_INFO"], body, region):
            if fault.done:
                with self._one_at_a_time:
                    for _ in self._moto(environ, lambda *_: None):
                        pass
            return answer(start_response, fault.status, fault.code, fault.message)
        if "/pricing/" in environ.get("HTTP_AUTHORIZATION", ""):  # moto does not have it, and says so at length
            start_response("501 Not Implemented", [("Content-Length", "0")])
            return []
        with self._one_at_a_time:
            chunks = list(self._moto(environ, noted))
        if answered and answered[0].startswith("5"):  # shown with a test that fails
            excerpt = b"".join(chunks)[:2000]
            print(f"moto failed: {body[:300]!r}: {answered[0]}: {excerpt!r}", file=sys.stderr)
        return chunks

    def _refused_by_service(
        self, call: calls.Call | None, method: str, start_response: Callable[..., Any]
    ) -> list[bytes] | None:
        if self.throttle.refuses(call):
            return answer(start_response, "503 Service Unavailable", "RequestLimitExceeded", "Request limit exceeded.")
        if home := bucket_regions.region_of(call):
            return bucket_regions.redirect(start_response, method, home)
        return None

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


def answer(start_response: Callable[..., Any], status: str, code: str, message: str) -> list[bytes]:
    """Answers with an error, as EC2 does."""
    body = ERROR.format(code=code, message=message).encode()
    start_response(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
    return [body]


@contextmanager
def serving() -> Iterator[FaultyApi]:
    """The API of an account that is set up, listening on a port of the loopback."""
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    close_gaps()
    api = FaultyApi()
    server = make_server("127.0.0.1", 0, api, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    administer(api.url)
    yield api
    server.shutdown()
    thread.join()
    server.server_close()
