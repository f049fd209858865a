"""Connections of the server, which uvicorn does not limit in time."""

from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 30
"""Time for a client to send the headers of a request."""


class Connection(H11Protocol):
    """A connection that is closed when no request begins in time."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEADER_SECONDS, self._check, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._timer.cancel()

    def _check(self, ended: Any) -> None:
        """Close unless a request has begun since the last check, when `ended` was answered and no other had begun."""
        cycle = self.cycle
        if cycle is ended:
            self.transport.close()
        elif not self.transport.is_closing():
            self._timer = self.loop.call_later(HEADER_SECONDS, self._check, cycle if cycle.response_complete else self)
