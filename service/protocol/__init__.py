"""Bytes <-> arrays: the only place that knows the wire. It knows no queue, and of a model only its Signature.

Every fault is a RequestError that names the field, what was found and what was expected.
"""

from service.protocol.arrange import Decoded, Signature
from service.protocol.npy import decode_npy, encode_npy
from service.protocol.oip import decode, encode, encode_json

__all__ = ["Decoded", "Signature", "decode", "decode_npy", "encode", "encode_json", "encode_npy"]
