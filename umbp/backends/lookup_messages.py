# SPDX-License-Identifier: Apache-2.0
"""What travels over a lookup socket: typed msgpack, one frame a message, nothing else.

Both messages are flat arrays that begin with the protocol version and the question's id, in every
version, so that a peer of another version can at least say whom it cannot answer:

    question  [protocol, question_id, namespace, epoch, [[group_index, hash_bytes, hashes], ...]]
    reply     [protocol, question_id, rank, masks or nil, error]

A mask has one bit per block of the part, most significant first, as ``numpy.packbits`` packs them.
A frame is never trusted: its size, its types and its counts are checked before it is used.
"""

from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from umbp.backends.base import LookupQuestion
from umbp.keys import NAMESPACE_BYTES

PROTOCOL: Final = 1
"""Version of these messages."""

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Longest frame in either direction; the 32-byte hashes of 2**18 blocks take half of it."""

BLOCKS_MAX: Final = 1 << 18
"""Most blocks in one question: prompts of four million tokens in blocks of 16."""

PARTS_MAX: Final = 256
"""Most parts in one question. vLLM's models have a handful of cache groups."""

ERROR_CHARACTERS_MAX: Final = 400
"""Longest error text in a reply; longer ones are cut."""

BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]

_Count = Annotated[int, msgspec.Meta(ge=0)]
_UInt16 = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Namespace = Annotated[bytes, msgspec.Meta(min_length=NAMESPACE_BYTES, max_length=NAMESPACE_BYTES)]
_Error = Annotated[str, msgspec.Meta(max_length=ERROR_CHARACTERS_MAX)]


class MessageError(ValueError):
    """A message is malformed, exceeds a limit, or refuses what was asked. The text is one line."""


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """The two fields that every message of every version begins with."""

    protocol: int
    question_id: int


class QuestionPart(msgspec.Struct, array_like=True, frozen=True):
    """One group of a question; ``hashes`` joins hashes of ``hash_bytes`` each."""

    group_index: _UInt16
    hash_bytes: Annotated[int, msgspec.Meta(ge=1, le=0xFFFF)]
    hashes: bytes

    @property
    def block_count(self) -> int:
        """Number of whole hashes in ``hashes``."""
        return len(self.hashes) // self.hash_bytes


class Question(msgspec.Struct, array_like=True, frozen=True):
    """Asks one rank which blocks it holds."""

    protocol: int
    question_id: int
    namespace: _Namespace
    epoch: _Count
    parts: Annotated[tuple[QuestionPart, ...], msgspec.Meta(max_length=PARTS_MAX)]


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """One rank's only reply to a question: one mask per part, or None and an error."""

    protocol: int
    question_id: int
    rank: _UInt16
    masks: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=PARTS_MAX)] | None
    error: _Error = ""


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_question_decoder = msgspec.msgpack.Decoder(Question)
_reply_decoder = msgspec.msgpack.Decoder(Reply)

_Message = TypeVar("_Message")


def encode_question(question: LookupQuestion, namespace: bytes) -> bytes:
    """Encodes a question, once for all ranks.

    Raises:
        MessageError: It exceeds a limit, so that every rank would refuse it.
    """
    parts = tuple(
        QuestionPart(part.group_index, part.hash_bytes, part.hashes) for part in question.parts
    )
    _check_counts(parts)
    frame = _encoder.encode(
        Question(PROTOCOL, question.question_id, namespace, question.epoch, parts)
    )
    _check_size(frame)
    return frame


def decode_question(frame: bytes) -> Question:
    """Decodes a question whose envelope says this version.

    Raises:
        MessageError: It is malformed or exceeds a limit.
    """
    question = _decode(_question_decoder, frame)
    _check_counts(question.parts)
    return question


def encode_reply(reply: Reply) -> bytes:
    """Encodes a reply. An error text is cut when it is too long, and made encodable.

    Raises:
        MessageError: It exceeds a limit.
    """
    error = reply.error
    if len(error) > ERROR_CHARACTERS_MAX:
        error = error[: ERROR_CHARACTERS_MAX - 3] + "..."
    # Python decodes a file name that is no UTF-8 to lone surrogates, which msgpack cannot carry.
    error = error.encode(errors="replace").decode()
    frame = _encoder.encode(msgspec.structs.replace(reply, error=error))
    _check_size(frame)
    return frame


def decode_reply(frame: bytes) -> Reply:
    """Decodes a reply whose envelope says this version.

    Raises:
        MessageError: It is malformed or exceeds a limit.
    """
    return _decode(_reply_decoder, frame)


def decode_envelope(frame: bytes) -> Envelope:
    """Reads version and question id of a message of any version.

    Raises:
        MessageError: It has no envelope, so there is nobody to tell.
    """
    return _decode(_envelope_decoder, frame)


def pack_mask(present: Sequence[bool]) -> bytes:
    """Packs one bool per block into bits; the last byte is filled up with zeros."""
    return np.packbits(np.asarray(present, dtype=np.bool_)).tobytes()


def read_mask(mask: bytes, block_count: int) -> ByteArray:
    """Views a mask as uint8[ceil(block_count / 8)], still packed, so that masks can be combined.

    Raises:
        MessageError: It has another length.
    """
    if len(mask) != (block_count + 7) // 8:
        raise MessageError(f"mask of {len(mask)} bytes for {block_count} blocks")
    return np.frombuffer(mask, dtype=np.uint8)


def unpack_mask(mask: ByteArray, block_count: int) -> BoolArray:
    """Unpacks bits into bool[block_count]."""
    return np.unpackbits(mask, count=block_count).view(np.bool_)


def _decode(decoder: "msgspec.msgpack.Decoder[_Message]", frame: bytes) -> _Message:
    _check_size(frame)
    try:
        return decoder.decode(frame)
    # Nesting without end is a RecursionError, which msgspec does not make its own.
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"malformed message: {error}") from error


def _check_size(frame: bytes) -> None:
    if len(frame) > MESSAGE_BYTES_MAX:
        raise MessageError(
            f"message of {len(frame)} bytes, at most {MESSAGE_BYTES_MAX} may be sent"
        )


def _check_counts(parts: Sequence[QuestionPart]) -> None:
    for part in parts:
        if part.hash_bytes < 1 or len(part.hashes) % part.hash_bytes:
            raise MessageError(
                f"{len(part.hashes)} bytes are no whole number of {part.hash_bytes}-byte hashes"
            )
    if len(parts) > PARTS_MAX:
        raise MessageError(f"question of {len(parts)} parts, at most {PARTS_MAX} may be asked")
    blocks = sum(part.block_count for part in parts)
    if blocks > BLOCKS_MAX:
        raise MessageError(f"question for {blocks} blocks, at most {BLOCKS_MAX} may be asked")
