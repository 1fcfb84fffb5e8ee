"""A server on loopback in the test's own process."""

import sys
from http.server import ThreadingHTTPServer


class LoopbackServer(ThreadingHTTPServer):
    """It answers each request in a thread, and is silent of a client that hung up.

    `traceback` of 3.11 parses the lines that it prints. Where the main thread parses too (an import of pydantic's) and collects
    garbage meanwhile, Python before 3.11.8 mixes up the two and ends the main thread's with a SystemError.
    """

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
