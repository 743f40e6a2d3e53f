"""Serves moto's API with all rules that make it as strict as AWS, and makes chosen requests fail as on AWS.

Both accounts of the tests are served by it: the one without machines, and the one of tests/aws/ec2.
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

from tests.aws import bucket_regions, request_models
from tests.aws.errors import answer, session_ended
from tests.aws.moto_gaps import close_gaps, modes, take_time
from tests.aws.new_resources import NewResources
from tests.aws.rights import calls
from tests.aws.rights.judge import Judge, administer, refusal
from tests.aws.throttling import Throttle

Request = dict[str, str]


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
        ended: the session tokens that are valid no longer.
        judge: refuses what the policy does not allow.
        throttle: refuses what is too much.
        new: hides what has just been created.
        modes: how the account behaves.
        malformed: what AWS's description of its API does not allow.
    """

    def __init__(self) -> None:
        self.url = ""
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.tokens: list[tuple[str, str]] = []
        self.ended: set[str] = set()
        self.judge = Judge()
        self.throttle = Throttle()
        self.new = NewResources()
        self.modes = modes
        self.malformed: list[str] = []
        self._lock = threading.Lock()
        # moto's backends are not made for threads: a request may fail half done, and is then repeated.
        self._one_at_a_time = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        take_time()
        environ["wsgi.input"] = io.BytesIO(body)
        answered: list[Any] = []
        self.tokens.append((environ.get("HTTP_USER_AGENT", ""), environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")))
        call = calls.read(environ, body)
        if refused := self._refused(call, environ, body, start_response):
            return refused
        region = call.region if call else ""
        document = call.action if call and call.service == "cloudwatch" else ""
        if fault := self._fault(environ["REQUEST_METHOD"], environ["PATH_INFO"], body, region, document):
            if fault.done:
                with self._one_at_a_time:
                    for _ in self._moto(environ, lambda *_: None):
                        pass
            service = "cloudwatch" if call and call.service == "cloudwatch" else "ec2"
            return answer(start_response, fault.status, fault.code, fault.message, service)
        if "/pricing/" in environ.get("HTTP_AUTHORIZATION", ""):  # moto does not have it, and says so at length
            start_response("501 Not Implemented", [("Content-Length", "0")])
            return []
        with self._one_at_a_time:
            answered_with = b"".join(self._moto(environ, lambda *told: answered.extend(told)))
            status, headers = answered[0], answered[1]
            if status.startswith("2"):
                self.new.note(call, answered_with)
                told = self.new.without(call, answered_with)
                if told != answered_with:
                    headers = [pair for pair in headers if pair[0].lower() != "content-length"]
                    headers.append(("Content-Length", str(len(told))))
                    answered_with = told
        if status.startswith("5"):  # shown with a test that fails
            print(f"moto failed: {body[:300]!r}: {status}: {answered_with[:2000]!r}", file=sys.stderr)
        start_response(status, headers)
        return [answered_with]

    def _refused(
        self, call: calls.Call | None, environ: dict[str, Any], body: bytes, start_response: Callable[..., Any]
    ) -> list[bytes] | None:
        """Answers a call that AWS refuses, as it does: session, rate, form, rights, place, in this order."""
        if environ.get("HTTP_X_AMZ_SECURITY_TOKEN") in self.ended:
            return session_ended(start_response, call.service if call else "")
        if self.throttle.refuses(call):
            return answer(start_response, "503 Service Unavailable", "RequestLimitExceeded", "Request limit exceeded.")
        if call and (defect := request_models.defect(call, environ, body)):
            self.malformed.append(f"{call.service}:{call.action}: {defect.text}")
            print(f"malformed: {self.malformed[-1]}", file=sys.stderr, flush=True)
            return answer(start_response, "400 Bad Request", defect.code(call.service), defect.text, call.service)
        with self._one_at_a_time:
            self.modes.forget_ended()
            if self.judge.refuses(environ, body):
                print(f"refused: {self.judge.refused[-1]}", file=sys.stderr, flush=True)
                return refusal(start_response, call.service if call else "")
        if home := bucket_regions.region_of(call):
            return bucket_regions.redirect(start_response, environ["REQUEST_METHOD"], home)
        if missing := self.new.missing(call):
            return answer(start_response, "400 Bad Request", *missing)
        return None

    def inject(self, fault: Fault) -> Fault:
        """Adds a fault."""
        self.faults.append(fault)
        return fault

    def reset(self) -> None:
        """Forgets what a test has injected and what it has asked; what it has created is known from now on."""
        self.faults.clear()
        self.requests.clear()
        self.ended.clear()
        self.judge.refused.clear()
        self.malformed.clear()
        self.throttle.reset()
        self.new.reset()
        self.modes.reset()

    def _fault(self, method: str, path: str, body: bytes, region: str, document: str) -> Fault | None:
        request = dict(urllib.parse.parse_qsl(body.decode("latin-1"))) if body.startswith(b"Action=") else {}
        request = {"Action": document} if document else request
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
def serving(*, administered: bool = True) -> Iterator[FaultyApi]:
    """The API of an account, listening on a port of the loopback.

    Args:
        administered: whether an administrator has set the account up.
    """
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    close_gaps()
    api = FaultyApi()
    server = make_server("127.0.0.1", 0, api, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    if administered:
        administer(api.url)
    try:
        yield api
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
