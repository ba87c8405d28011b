"""What the head of an infer request says: its content type, coding and lengths. Knows no connection and no model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from service.asgi import JSON
from service.body import ENCODINGS
from service.errors import InvalidInput, MethodNotAllowed, UnsupportedEncoding, UnsupportedMedia
from service.protocol import Decoded, Signature, decode, decode_npy
from service.protocol.query import NAMES, NOTHING, Query, read_query

OCTETS: Final = b"application/octet-stream"
NPY: Final = b"application/x-npy"


def is_infer(path: str) -> bool:
    """Whether `path` is the infer path of some model, known or not."""
    if not (path.startswith("/v2/models/") and path.endswith("/infer")):
        return False
    slashes = path.count("/")
    return slashes == 4 or (slashes == 6 and path.split("/")[4] == "versions")


class InferHead:
    """The few request headers that matter here; raises the RequestError that they deserve."""

    __slots__ = ("content_type", "encoding", "json_length", "length", "query")

    def __init__(self, method: str, headers: Iterable[tuple[bytes, bytes]], query: bytes) -> None:
        if method != "POST":
            raise MethodNotAllowed(f"method {method}: infer takes POST")
        self.content_type = b""
        self.json_length: bytes | None = None
        self.length: int | None = None
        self.encoding = ""  # gzip or deflate, if any
        for name, value in headers:
            if name == b"content-length":
                self.length = int(value)  # the server's parser has checked it, and that there is one
            elif name == b"content-type":
                self.content_type = value.partition(b";")[0].strip().lower()
            elif name == b"inference-header-content-length":
                if self.json_length is not None:
                    raise InvalidInput("Inference-Header-Content-Length: found twice, expected once")
                self.json_length = value
            elif name == b"content-encoding":
                if self.encoding:
                    raise UnsupportedEncoding("Content-Encoding: found twice, expected one coding")
                self.encoding = value.strip().lower().decode("latin-1")
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":  # the parser undoes no other
                raise UnsupportedEncoding(
                    f"Transfer-Encoding: found {value[:40].decode('latin-1')!r}, expected chunked alone"
                )
        if self.encoding == "identity":
            self.encoding = ""
        if self.encoding and self.encoding not in ENCODINGS:
            raise UnsupportedEncoding(
                f"Content-Encoding: found {self.encoding[:40]!r}, expected {' or '.join(ENCODINGS)}"
            )
        if self.content_type not in (b"", JSON, OCTETS, NPY):
            raise UnsupportedMedia(
                f"Content-Type: found {self.content_type[:80].decode('latin-1')!r}, expected application/json, "
                "application/octet-stream or application/x-npy"
                + ("; curl sends this unless -H names another" if b"form-urlencoded" in self.content_type else "")
            )

        self.query = self._read_query(query) if query else NOTHING

    def _read_query(self, query: bytes) -> Query:
        asked = read_query(query)
        npy = self.content_type == NPY
        raw = not npy and self.json_length is not None and not self.json_length.strip(b"0")
        wrong = [name for name in NAMES if getattr(asked, name) != getattr(NOTHING, name)]
        if raw and asked.seq_lens is not None:
            raise InvalidInput(
                "seq_lens: in the query of a raw body, which is one sequence; send npy or binary tensors"
            )
        if wrong and not (npy or raw):
            raise InvalidInput(f"{wrong[0]}: in the query, which is for npy and raw bodies; JSON has a place for it")
        return asked

    def json_size(self, body_size: int) -> int:
        """Bytes of the body's JSON part; 0 where there is none, or its length is no number."""
        if self.content_type == NPY:
            return 0
        if self.json_length is None:
            return 0 if self.content_type == OCTETS else body_size
        return int(self.json_length) if self.json_length.isdigit() and len(self.json_length) < 18 else 0

    def decode(self, signature: Signature, body: memoryview, max_json: int) -> Decoded:
        """The body as arrays, by its content type."""
        if self.content_type == NPY:
            return self._asked(decode_npy(signature, body, self.query.seq_lens))
        if self.content_type == OCTETS and self.json_length is None:
            raise InvalidInput(
                "Inference-Header-Content-Length: missing; binary tensors need it (0: the body is `tokens` alone)"
            )
        return self._asked(decode(signature, body, self.json_length, max_json))

    def _asked(self, decoded: Decoded) -> Decoded:
        """With what the query asks."""
        query = self.query
        if query is not NOTHING:
            decoded.timeout_s = query.timeout / 1e6 or decoded.timeout_s
            decoded.priority = query.priority or decoded.priority
            decoded.isolate = query.isolate or decoded.isolate
        return decoded
