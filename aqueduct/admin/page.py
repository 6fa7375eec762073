"""The live page of a service at the admin port: what a browser shows of ``/state.json``.

Its files are in ``live/``, as they are: there is nothing to build. The page has the numbers from
``/state.json`` alone, and the browser is told to load nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Final

from aqueduct.admin.http_server import HttpRequest, HttpResponse, Route

__all__ = ["page_routes"]

_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Texts of strangers can become text alone: an assignment to innerHTML is an error.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/live/page.css": ("page.css", "text/css; charset=utf-8"),
    "/live/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/live/icon.svg": ("icon.svg", "image/svg+xml"),
}


def page_routes() -> Mapping[str, Route]:
    """The files of the page, by path."""
    return {path: _route(*named) for path, named in _FILES.items()}


def _route(name: str, content_type: str) -> Route:
    async def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(
            _content(name), content_type, headers={"Content-Security-Policy": _POLICY}
        )

    return answer


@cache
def _content(name: str) -> bytes:
    return (files("aqueduct.admin") / "live" / name).read_bytes()
